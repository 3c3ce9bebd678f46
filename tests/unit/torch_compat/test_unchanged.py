"""Two modules are alike, and modules hold what they held: found by what differs in them."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rekindle.torch_compat.alike import Alike, alike
from rekindle.torch_compat.unchanged import Unchanged


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.number, self.names = 1.5, {"a": [1, 2], "b": (1, (2, "c"))}
        self.order: OrderedDict[str, float] = OrderedDict()
        self.kinds = {"p", "q"}
        self.kernel = len
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))


# What is done to a module, and whether it stays like another, plain attributes aside.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda m: setattr(m, "number", 1.25),
    "a number in a list": lambda m: m.names["a"].__setitem__(1, 3),
    "a longer list": lambda m: m.names["a"].append(3),
    "a tuple": lambda m: m.names.__setitem__("b", (1, (2, "d"))),
    "a key": lambda m: m.names.__setitem__("z", 1),
    "a key taken away": lambda m: m.names.pop("a"),
    "a table with an order": lambda m: m.order.update(x=1.0),
    "a set": lambda m: m.kinds.add("r"),
    "a function": lambda m: setattr(m, "kernel", sum),
    "a new attribute": lambda m: setattr(m, "other", 0),
    "eval mode": lambda m: m.norm.eval(),
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "other data": lambda m: setattr(m.linear.weight, "data", torch.zeros(3, 4)),
    "another layout": lambda m: setattr(m.linear.weight, "data", torch.zeros(3, 4).t()),
    "another type": lambda m: m.double(),
    "a buffer": lambda m: m.register_buffer("mask", torch.ones(4)),
    "no buffer": lambda m: m.register_buffer("mask", None),
    "a hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
    "a hook of backward": lambda m: m.register_full_backward_hook(lambda *_: None),
    "another class": lambda m: setattr(m.linear, "__class__", type("Other", (nn.Linear,), {})),
    "another module": lambda m: setattr(m, "linear", nn.Linear(3, 4, bias=False)),
    "tied": lambda m: setattr(m.norm, "bias", m.norm.weight),
    "its own forward": lambda m: setattr(m, "forward", lambda x: x),
}


def test_a_copy_is_alike() -> None:
    first = Part()
    other = copy.deepcopy(first)
    found = alike(first, other)
    assert isinstance(found, Alike)
    assert not found.differing
    tensors = {id(a): b for a, b in zip(all_of(first), all_of(other), strict=True)}
    assert {k: id(v) for k, v in found.tensors.items()} == {k: id(v) for k, v in tensors.items()}


def all_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


@pytest.mark.parametrize("kind", sorted(CHANGES))
def test_what_differs_is_found(kind: str) -> None:
    first = Part()
    other, seen = copy.deepcopy(first), Unchanged([first])
    tensors = seen.tensors([first])
    assert tensors is not None
    assert {*map(id, tensors)} == {*map(id, all_of(first))}
    CHANGES[kind](first)
    found = alike(first, other)
    assert isinstance(found, str) or found.differing
    assert seen.tensors([first]) is None
    if isinstance(found, Alike):
        assert kind in ("a number", "eval mode"), "these are for guards to look at"


def test_what_is_set_again_is_no_change() -> None:
    part = Part()
    seen = Unchanged([part])
    part.number = 1.25
    assert seen.tensors([part]) is None
    part.number = 1.5  # a constant of this code object, and no longer the one of the class
    part.train()
    part.linear.weight.grad = torch.ones(4, 3)
    with torch.no_grad():
        part.linear.weight.add_(1.0)
    again = Unchanged([part])
    assert again.tensors([part]) is not None
    assert again.tensors([Part()]) is None
    assert again.tensors([part, part]) is None


@pytest.mark.parametrize("shared", ["linear", "names", "mask"])
def test_what_two_share_makes_them_different(shared: str) -> None:
    first, other = Part(), Part()
    setattr(other, shared, getattr(first, shared))
    assert alike(first, other) == shared


def test_tables_with_an_order_are_not_compared() -> None:
    first, other = Part(), Part()
    first.order["x"] = other.order["x"] = 1.0
    assert alike(first, other) == "order"


def test_negative_zero_and_kinds_of_numbers() -> None:
    first, other = Part(), Part()
    for a, b in ((0.0, -0.0), (1, True), (1, 1.0), ("1", 1)):
        first.number, other.number = a, b
        found = alike(first, other)
        assert isinstance(found, Alike)
        assert found.differing == {"number"}
    first.number = other.number = float("nan")
    found = alike(first, other)
    assert isinstance(found, Alike)
    assert not found.differing


def test_what_was_watched_may_go() -> None:
    part = Part()
    seen = Unchanged([part])
    for _ in range(50):  # others come to the addresses of those that are gone
        part.names, part.order = {"a": [1, 2], "b": (1, (2, "c"))}, OrderedDict()
        part.linear, part.number = nn.Linear(3, 4), float("1.5")
        part.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        found = seen.tensors([part])
        assert found is None or {*map(id, found)} == {*map(id, all_of(part))}
