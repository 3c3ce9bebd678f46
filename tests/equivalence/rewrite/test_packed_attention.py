"""Attention's backward writes the gradients of packed projections where they belong."""

import contextlib

import pytest
import torch
from support.compare import assert_same, train
from support.manage import example_of, manage
from support.zoo import Example
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

F = nn.functional
BATCH, LENGTH, SIZE, HEADS = 3, 40, 64, 4


class Attention(nn.Module):
    def __init__(self, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm, self.packed = nn.LayerNorm(SIZE), nn.Linear(SIZE, 3 * SIZE)
        self.last = nn.Linear(SIZE, SIZE)
        self.dropout, self.causal = dropout, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.packed(self.norm(x)).reshape(BATCH, LENGTH, 3, HEADS, -1)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        # On a CPU torch has one kernel for all of them.
        kernel = SDPBackend.EFFICIENT_ATTENTION
        with sdpa_kernel(kernel) if x.is_cuda else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout, is_causal=self.causal
            )
        return x + self.last(out.transpose(1, 2).reshape(BATCH, LENGTH, SIZE))


def make(dropout: float, causal: bool, dtype: torch.dtype, device: torch.device) -> Example:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(dropout, causal), Attention(dropout, causal))

    def inputs(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(BATCH, LENGTH, SIZE, generator=generator).to(device, dtype)

    return example_of(model.to(device, dtype), inputs)


@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor", "thrice"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dropout", "causal"), [(0.0, False), (0.0, True), (0.2, False)])
def test_three_steps_equal_eager(
    dropout: float, causal: bool, dtype: torch.dtype, schedule: str, device: torch.device
) -> None:
    def anew() -> Example:
        return make(dropout, causal, dtype, device)

    mine = anew()
    managed = manage(mine, schedule)
    names = [op.name for op in managed.plan.problem.ops]
    if device.type == "cuda":
        assert sum("packed_attention_backward" in name for name in names) == 2
        assert not [name for name in names if "rekindle.stacked" in name]
    again = train(anew()) if device.type == "cuda" else None
    assert_same(train(anew()), train(mine, managed), again)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "thrice"])
def test_with_torch_s_own_layers(schedule: str, batch_first: bool, device: torch.device) -> None:
    """No copy for attention; zeros are added to its gradients, as eager adds up padded parts."""

    def anew() -> Example:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(SIZE, HEADS, SIZE, 0.1, batch_first=batch_first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def inputs(step: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(step)
            return torch.randn(BATCH, LENGTH, SIZE, generator=generator).to(device)

        return example_of(model.to(device), inputs)

    mine = anew()
    managed = manage(mine, schedule)
    if device.type == "cuda":
        largest = 3 * BATCH * LENGTH * SIZE * 4  # the projection, or its gradient
        ops = managed.plan.problem.ops
        sizes = [v.size for v in managed.plan.problem.values]
        copies = [op for op in ops if "aten.clone" in op.name]
        assert all(sizes[op.outputs[0]] < largest for op in copies)
    again = train(anew()) if device.type == "cuda" else None
    assert_same(train(anew()), train(mine, managed), again)
