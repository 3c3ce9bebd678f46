"""Copies that only change a layout are made once: the same bits, fewer ops."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import assert_same, train
from support.manage import example_of, manage
from support.zoo import Example
from torch import nn

from rekindle.rewrite.layout_algebra import digits_of, merged, through

F = nn.functional


# --- layouts ------------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn, num: int) -> tuple[list[int], list[int]]:
    """A shape of that many elements, and an order of its dimensions."""
    shape = []
    left = num
    while left > 1:
        factor = draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0]))
        shape.append(factor)
        left //= factor
    shape.insert(draw(st.integers(0, len(shape))), 1)
    return shape, draw(st.permutations(range(len(shape))))


@given(st.data(), st.sampled_from([1, 6, 12, 24, 36, 60]), st.integers(1, 3))
def test_a_view_of_copies_is_one_of_the_source(
    data: st.DataObject, num: int, num_copies: int
) -> None:
    shape, order = data.draw(views(num))
    source = torch.arange(num).view(shape).permute(order)
    layouts = []  # per copy: what was copied
    shown = source
    for _ in range(num_copies):
        layouts.append((tuple(shown.shape), shown.stride()))
        shape, order = data.draw(views(num))
        shown = shown.contiguous().view(shape).permute(order)
    digits = digits_of(shown.shape, shown.stride())
    for copied, stride in reversed(layouts):
        found = through(digits, copied, stride)
        if found is None:  # digits that do not divide each other
            return
        digits = found
        assert math.prod(size for _, size, _ in digits) == num
    stride = merged(digits, shown.dim())
    if stride is not None:
        assert torch.equal(source.as_strided(shown.shape, stride), shown)


def test_heads_in_another_order_are_found_through_two_copies() -> None:
    batch, heads, length, size = 3, 4, 6, 8
    grad = torch.arange(batch * heads * length * size).view(batch, length, heads, size)
    first = grad.transpose(1, 2)
    second = first.contiguous().view(batch * heads, length, size).transpose(0, 1)
    shown = second.contiguous().view(length, batch, heads * size)
    once = through(digits_of(shown.shape, shown.stride()), second.shape, second.stride())
    assert once is not None
    assert merged(once, 3) is None  # heads and their numbers lie apart there
    twice = through(once, first.shape, first.stride())
    assert twice is not None
    assert torch.equal(grad.as_strided(shown.shape, merged(twice, 3)), shown)


# --- models -------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A projection for queries, keys and values at once, taken apart by `function`."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.packed, self.last = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self, self.packed(self.first(x)))).square().mean()


def as_in_torch(_net: Packed, packed: torch.Tensor) -> torch.Tensor:
    """As nn.MultiheadAttention does it."""
    parts = packed.unflatten(-1, (3, 8)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    q, k, v = (parts[i].view(-1, 10, 4).transpose(0, 1) for i in range(3))
    out = (q @ k.transpose(1, 2)).softmax(-1) @ v
    return out.transpose(0, 1).reshape(packed.shape[0], -1, 8)


def as_in_timm(_net: Packed, packed: torch.Tensor) -> torch.Tensor:
    batch, length = packed.shape[:2]
    q, k, v = packed.reshape(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, 8)


def in_two(_net: Packed, packed: torch.Tensor) -> torch.Tensor:
    """Read as they are: no copy follows."""
    parts = packed.view(*packed.shape[:2], 3, 8)
    return parts[:, :, 0] * parts[:, :, 1].sigmoid() + parts[:, :, 2].tanh()


def minus_zero(_net: Packed, packed: torch.Tensor) -> torch.Tensor:
    """Gradients of -0, which the sum of padded parts makes 0."""
    parts = packed.view(*packed.shape[:2], 3, 8)
    return parts[:, :, 0] * -0.0 + parts[:, :, 1] * parts[:, :, 2].relu()


def one_is_idle(_net: Packed, packed: torch.Tensor) -> torch.Tensor:
    """Nothing reads the third part: its gradient is the zeros of the padding."""
    parts = packed.view(*packed.shape[:2], 3, 8)
    return parts[:, :, 0] * parts[:, :, 1].sigmoid()


def one_twice(_net: Packed, packed: torch.Tensor) -> torch.Tensor:
    """Two gradients of one part: three of the four are joined, the fourth is padded and added."""
    parts = packed.view(*packed.shape[:2], 3, 8)
    return parts[:, :, 0] * parts[:, :, 1] * parts[:, :, 2].sigmoid() + parts[:, :, 0].tanh()


PADDED = {one_twice: 1, one_is_idle: 2}  # paddings that stay
JOINED = [as_in_torch, as_in_timm, in_two, minus_zero, one_twice]


def example(function: Callable[..., torch.Tensor], device: torch.device) -> Example:
    torch.manual_seed(0)

    def inputs(step: int) -> torch.Tensor:
        return torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(step)).to(device)

    return example_of(Packed(function).to(device), inputs, lambda out: out)


def joins(name: str) -> bool:
    """Whether the op writes parts of a gradient: by itself, or as attention's backward."""
    return "rekindle.stacked" in name or "rekindle.packed_attention_backward" in name


@pytest.mark.parametrize("function", [*JOINED, one_is_idle], ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor", "thrice"])
def test_three_steps_equal_eager(
    function: Callable[..., torch.Tensor], schedule: str, device: torch.device
) -> None:
    expected = train(example(function, device))
    again = train(example(function, device)) if device.type == "cuda" else None
    mine = example(function, device)
    managed = manage(mine, schedule)
    names = [op.name for op in managed.plan.problem.ops]
    assert any(map(joins, names)) == (function in JOINED)
    padded = [n for n in names if "select_backward" in n or "aten.stack" in n]
    assert len(padded) == PADDED.get(function, 0)
    assert_same(expected, train(mine, managed), again)


@pytest.mark.parametrize("layers", [1, 2])
def test_attention_of_torch(layers: int, device: torch.device) -> None:
    """Six copies, three paddings, two sums and a copy are one op for each attention."""

    def make() -> Example:
        torch.manual_seed(0)
        model = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
            layers,
            enable_nested_tensor=False,
        )

        def inputs(step: int) -> torch.Tensor:
            return torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(step)).to(device)

        return example_of(model.to(device), inputs)

    mine = make()
    managed = manage(mine)
    backward = [op.name for op in managed.plan.problem.ops if op.phase == "backward"]
    assert sum(map(joins, backward)) == layers
    assert not [name for name in backward if "select_backward" in name]
    copies = [name for name in backward if "aten.clone" in name]
    # Of gradients that have not their parameter's layout, and for the product behind attention.
    assert len(copies) <= 2 * layers
    again = train(make()) if device.type == "cuda" else None
    assert_same(train(make()), train(mine, managed), again)
