"""Blocks that are built alike are read once: what differs between them, from the start or later,
is found, and the step is eager's to the bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.core import keep_all
from rekindle.pipeline import recorded
from rekindle.plans.options import Options

SHARED = {"scale": 1.0}


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number  # nobody reads it
        self.norm, self.drop = nn.LayerNorm(6), nn.Dropout(0.25)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale, self.parts = 1.0, [2.0, 0.5]

    def forward(self, x: Tensor, shift: Tensor, double: bool = False) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x) + shift))) * self.scale * self.parts[0]
        return x + self.drop(y) * (2.0 if double else 1.0)


class Stack(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module] = Block, num: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make(i) for i in range(num))
        self.shift = nn.Parameter(torch.ones(6))
        self.doubled: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        for i, block in enumerate(self.blocks):
            x = block(x, self.shift, double=i in self.doubled)
        return x.square().mean()


def num_repeated(model: nn.Module, *args: Any) -> int:
    _, reading = recorded(Options(), model, args, {})
    return reading.guards.num_repeated


def step(model: nn.Module, x: Tensor, seed: int) -> list[Tensor | None]:
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [
        loss.detach(),
        *(None if p.grad is None else p.grad.clone() for p in model.parameters()),
    ]


def check(model: nn.Module, change: Callable[[Any], Any] | None = None) -> None:
    """Four steps like eager's, two of them after the change."""
    x = torch.randn(3, 6)
    eager = copy.deepcopy(model)
    managed = rekindle.rematerialize(model, (x,), schedule=keep_all, on_miss="replan")
    for i in range(4):
        if i == 2 and change is not None:
            for each in (managed, eager):
                change(each)
        for a, b in zip(step(managed, x, i), step(eager, x, i), strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


def test_equal_blocks_are_read_once() -> None:
    model = Stack()
    assert num_repeated(model, torch.randn(3, 6)) == 3
    check(model)


class Numbered(Block):
    def forward(self, x: Tensor, shift: Tensor, double: bool = False) -> Tensor:
        return super().forward(x, shift, double) * (1.0 + self.number)


class Counting(Block):
    def forward(self, x: Tensor, shift: Tensor, double: bool = False) -> Tensor:
        self.number += 1
        return super().forward(x, shift, double)


class InPlace(Block):
    def forward(self, x: Tensor, shift: Tensor, double: bool = False) -> Tensor:
        return super().forward(x.mul_(0.5), shift, double)


class Viewing(Block):
    def forward(self, x: Tensor, shift: Tensor, double: bool = False) -> Tensor:
        return x.view(x.shape)


class Asking(Block):
    def forward(self, x: Tensor, shift: Tensor, double: bool = False) -> Tensor:
        return super().forward(x, shift, double) * (2.0 if bool(self.up.bias[0] > 0) else 3.0)


PLACES: dict[int, float] = {}


class Placed(Block):
    def forward(self, x: Tensor, shift: Tensor, double: bool = False) -> Tensor:
        return super().forward(x, shift, double) * PLACES[id(self)]


class ByKey(nn.Module):
    """What a block is multiplied by stands in a table of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack()
        self.table = {block: 1.0 + i for i, block in enumerate(self.inner.blocks)}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner.blocks:
            x = block(x, self.inner.shift) * self.table[block]
        return x.square().mean()


def with_buffers(number: int) -> nn.Module:
    class Normed(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.statistics = nn.BatchNorm1d(6)

        def forward(self, x: Tensor, shift: Tensor, double: bool = False) -> Tensor:
            return self.statistics(super().forward(x, shift, double))

    return Normed(number)


NORMED = type(with_buffers(0))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Numbered, 0),  # a number that is read differs
        (Counting, 0),  # it is changed
        (Viewing, 0),  # what it returns shares its data
        (NORMED, 3),
        (InPlace, 3),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_blocks_that_differ_are_read_each(make: Callable[[int], nn.Module], expected: int) -> None:
    model = Stack(make)
    assert num_repeated(model, torch.randn(3, 6)) == expected
    if make is not Viewing:
        check(Stack(make))


def test_blocks_that_ask_the_data_are_each_asked() -> None:
    model = Stack(Asking)
    with torch.no_grad():
        for i, block in enumerate(model.blocks):
            block.up.bias.fill_(1.0 if i % 2 else -1.0)
    check(model)


def test_a_table_of_blocks_is_read_for_each() -> None:
    check(ByKey())


def mixed() -> dict[str, Callable[[Stack], Any]]:
    """Ways in which one block is another from the start."""

    def half(m: Stack) -> None:
        torch.manual_seed(1)
        m.blocks[2].down = nn.Linear(8, 6, bias=False)

    def tie(m: Stack) -> None:
        m.blocks[2].up.weight = m.blocks[1].up.weight

    def frozen(m: Stack) -> None:
        m.blocks[2].up.weight.requires_grad_(False)

    def twice(m: Stack) -> None:
        m.blocks[2].norm.bias = m.blocks[2].norm.weight

    return {
        "scale": lambda m: setattr(m.blocks[2], "scale", 0.5),
        "a number in a list": lambda m: m.blocks[2].parts.__setitem__(0, 3.0),
        "another layer": half,
        "tied to another": tie,
        "frozen": frozen,
        "in eval mode": lambda m: m.blocks[2].eval(),
        "a hook": lambda m: m.blocks[2].register_forward_hook(lambda _m, _a, out: out * 2.0),
        "the same block twice": lambda m: m.blocks.__setitem__(2, m.blocks[1]),
        "an argument": lambda m: setattr(m, "doubled", (2,)),
        "another dropout": lambda m: setattr(m.blocks[2].drop, "p", 0.5),
        "a negative zero": lambda m: setattr(m.blocks[2], "scale", -0.0),
        "an int for a float": lambda m: setattr(m.blocks[2], "scale", 1),
        "its own forward": lambda m: setattr(m.blocks[2], "forward", lambda x, *_a, **_k: x * 3.0),
        "the same parameter twice": twice,
    }  # fmt: skip


@pytest.mark.parametrize("kind", sorted(mixed()))
def test_a_block_that_differs(kind: str) -> None:
    model = Stack()
    mixed()[kind](model)
    check(model)


@pytest.mark.parametrize("kind", sorted(mixed()))
def test_a_block_that_comes_to_differ(kind: str) -> None:
    check(Stack(), mixed()[kind])


def test_all_blocks_change_in_the_same_way() -> None:
    def halve(m: Stack) -> None:
        for block in m.blocks:
            block.scale = 0.5

    check(Stack(), halve)


def test_blocks_change_places() -> None:
    def turn(m: Stack) -> None:
        m.blocks = nn.ModuleList(reversed(m.blocks))

    check(Stack(), turn)


def test_parameters_are_put_in_anew() -> None:
    def renew(m: Stack) -> None:
        for block in m.blocks:
            block.up.weight = nn.Parameter(block.up.weight.detach() + 1.0)

    check(Stack(), renew)
