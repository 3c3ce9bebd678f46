"""Copies that turn a tensor around: the same bits, through tiles on a GPU."""

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

from rekindle.rewrite.transpose_copies import add_turned, turn_of, turned

# --- layouts ------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([1, 2, 3, 16, 17, 20]), min_size=1, max_size=4),
    st.permutations(range(4)),
    st.permutations(range(4)),
)
def test_a_turn_reads_every_element_where_it_belongs(
    shape: list[int], source_order: list[int], made_order: list[int]
) -> None:
    def laid_out(order: list[int]) -> tuple[int, ...]:
        stride, step = [0] * len(shape), 1
        for d in [d for d in order if d < len(shape)]:
            stride[d] = step
            step *= shape[d]
        return tuple(stride)

    num = math.prod(shape)
    made = laid_out(made_order)
    x = torch.arange(num).as_strided(shape, laid_out(source_order))
    turn = turn_of(tuple(shape), x.stride(), made)
    if turn is None:
        return
    assert turn.rows >= 16
    assert turn.columns >= 16
    sizes = (turn.outer, turn.inner, turn.rows, turn.columns)
    read = x.as_strided(sizes, (turn.step_outer, turn.step_inner, 1, turn.step_column))
    written = torch.empty_strided(shape, made, dtype=x.dtype)
    written.as_strided((num,), (1,)).copy_(read.reshape(-1))
    assert torch.equal(written, x)


@pytest.mark.parametrize(
    ("shape", "order"),
    [((2, 20, 30), (0, 2, 1)), ((20, 30), (1, 0)), ((2, 4, 5, 32), (0, 3, 1, 2))],
)
def test_turned_tensors_are_seen(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    x = torch.empty(shape).permute(order)
    assert turn_of(tuple(x.shape), x.stride(), torch.empty(x.shape).stride()) is not None


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(2, 20, 30),  # dense
        torch.empty(20, 3, 40).transpose(0, 1),  # the last dimension stays where it is
        torch.empty(2, 8, 30).transpose(1, 2),  # too narrow
        torch.empty(20, 1).expand(20, 30).transpose(0, 1),  # read many times
        torch.empty(2, 20, 30)[:, ::2].transpose(1, 2)[:, ::2],  # single numbers either way
    ],
    ids=["dense", "outer", "narrow", "expanded", "sparse"],
)
def test_others_are_not(x: torch.Tensor) -> None:
    assert turn_of(tuple(x.shape), x.stride(), torch.empty(x.shape).stride()) is None


# --- the ops ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((3, 100, 77), (0, 2, 1)),
        ((128, 64), (1, 0)),
        ((2, 33, 14, 14), (0, 2, 3, 1)),
        ((2, 14, 14, 40), (0, 3, 1, 2)),
        ((2, 19, 3, 65), (0, 2, 3, 1)),
        ((2, 7, 19), (0, 2, 1)),  # not turned: copied as ever
    ],
)
def test_ops_equal_torch(
    shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(2, *shape)
    numbers.view(-1)[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40])
    a, b = numbers.to(device, dtype)
    x = a.permute(order)
    copy = turned(x)
    assert copy.is_contiguous()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(copy.view(bits), x.contiguous().view(bits))
    if dtype != torch.float16:
        other = b.permute(order).contiguous()
        total = add_turned(other, x)
        assert total.stride() == other.stride()
        assert torch.equal(total.nan_to_num(7.0), (other + x).nan_to_num(7.0))
        total = add_turned(x, other)
        assert total.stride() == x.stride()
        assert torch.equal(total.nan_to_num(7.0), (x + other).nan_to_num(7.0))


def test_a_view_with_an_offset_and_gaps(device: torch.device) -> None:
    store = torch.randn(4, 70, 90, device=device)
    x = store[1:, 3:40, 5:77].transpose(1, 2)
    assert turn_of(tuple(x.shape), x.stride(), torch.empty(x.shape).stride()) is not None
    assert torch.equal(turned(x), x.contiguous())


# --- models -------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Tokens mixed, then channels, on a stream that lies turned in memory as timm's does."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.tokens = nn.Linear(tokens, tokens)
        self.channels = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.second(x)).tanh()


class Moved(nn.Module):
    """Channels moved to the end for a norm, and back."""

    def __init__(self, tokens: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.linear = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(2, (-1, 4))
        y = self.linear(self.norm(self.conv(x).permute(0, 2, 3, 1)))
        return x + y.permute(0, 3, 1, 2)


def example(make: Callable[..., nn.Module], device: torch.device) -> Example:
    torch.manual_seed(0)
    batch, tokens, channels = (24, 116, 144) if device.type == "cuda" else (2, 20, 32)

    def inputs(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(batch, channels, tokens, generator=generator).to(device)

    return example_of(make(tokens, channels).to(device), inputs, lambda out: out.square().mean())


@pytest.mark.usefixtures("fuse_anywhere")
@pytest.mark.parametrize(("make", "num_turned", "num_sums"), [(Mixer, 7, 2), (Moved, 3, 1)])
@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor", "thrice"])
def test_three_steps_equal_eager(
    make: Callable[..., nn.Module],
    num_turned: int,
    num_sums: int,
    schedule: str,
    device: torch.device,
) -> None:
    expected = train(example(make, device))
    again = train(example(make, device)) if device.type == "cuda" else None
    mine = example(make, device)
    managed = manage(mine, schedule)
    names = [op.name for op in managed.plan.problem.ops]
    assert sum("rekindle.turned" in name for name in names) == num_turned
    assert sum("rekindle.add_turned" in name for name in names) == num_sums
    assert not [name for name in names if "aten.clone" in name]
    assert_same(expected, train(mine, managed), again)


def test_nothing_is_turned_on_a_cpu() -> None:
    managed = manage(example(Mixer, torch.device("cpu")))
    assert not [op.name for op in managed.plan.problem.ops if "turned" in op.name]
