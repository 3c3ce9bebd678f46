"""Softmax of scores with masked rows: the same bits, fewer passes on a GPU."""

import math

import pytest
import torch
from support.compare import assert_same, train
from support.manage import example_of, manage
from support.zoo import Example
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rekindle.rewrite.masked_softmax import masked_softmax

F = nn.functional
safe_softmax = torch.ops.aten._safe_softmax.default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [1, 7, 32, 100, 1500])
def test_rows_of_every_kind(num: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 9, num).to(device, dtype)
    scores[:, 0] = -math.inf
    scores[:, 1, 1:] = -math.inf
    scores[:, 2, :-1] = -math.inf
    scores[0, 3, num // 2] = math.nan
    scores[1, 3] = math.nan
    scores[:, 4] = -math.inf
    scores[:, 4, num // 2] = math.nan
    scores[:, 5, num // 3] = math.inf
    scores[:, 6] = math.inf
    ours, theirs = masked_softmax(scores), safe_softmax(scores, -1)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert not ours[:, 0].any()
    assert ours[:, 4].isnan().all()


class Attention(nn.Module):
    """With a learned bias, and rows that see nothing; not by a single kernel."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.projection = nn.Linear(size, 3 * size)
        self.bias = nn.Parameter(torch.randn(1, 1, length, length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.projection(x).chunk(3, -1))
        hidden = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        hidden[:3] = -torch.inf
        hidden[:, 5:7] = -torch.inf
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, self.bias + hidden)
        return out.squeeze(1).square().mean()


@pytest.mark.usefixtures("fuse_anywhere")
@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor", "thrice"])
def test_attention_with_a_learned_bias(schedule: str, device: torch.device) -> None:
    def make() -> Example:
        torch.manual_seed(0)
        batch, length, size = (16, 160, 32) if device.type == "cuda" else (2, 12, 8)

        def inputs(step: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(step)
            return torch.randn(batch, length, size, generator=generator).to(device)

        return example_of(Attention(length, size).to(device), inputs)

    mine = make()
    managed = manage(mine, schedule)
    names = [op.name for op in managed.plan.problem.ops]
    again = train(make()) if device.type == "cuda" else None
    assert_same(train(make()), train(mine, managed), again)
    assert sum("rekindle.masked_softmax" in name for name in names) == 1
    assert not [name for name in names if "_safe_softmax" in name]
