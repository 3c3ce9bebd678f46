"""Backward hooks of submodules: called once in each backward, with eager's gradients, and never
while planning."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.errors import PlanMismatch

Seen = list[Any]
Setup = Callable[["Net", Seen], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(torch.tanh(self.linear(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.third(self.second(self.first(x))))


def collects(model: Net, seen: Seen) -> None:
    for name, module in model.named_children():
        module.register_full_backward_hook(
            lambda _module, gave, got, name=name: seen.extend([name, gave[0], got[0]])
        )


def changes(model: Net, seen: Seen) -> None:
    model.second.register_full_backward_hook(lambda module, gave, got: (gave[0] * 0.5,))
    model.third.register_full_backward_pre_hook(lambda module, got: (got[0].clamp(-1e-3, 1e-3),))


def differentiates(model: Net, seen: Seen) -> None:
    """A hook has all of autograd and of the dispatcher."""

    def hook(module: Block, gave: Any, got: Any) -> Any:
        with torch.enable_grad():
            scale = torch.ones(16, requires_grad=True)
            (found,) = torch.autograd.grad((gave[0] * scale).square().sum(), scale)
        return (gave[0] @ module.linear.weight.detach() + found,)

    model.second.register_full_backward_hook(hook)


def of_a_shared_module(model: Net, seen: Seen) -> None:
    model.second = model.first
    collects(model, seen)


def raises(model: Net, seen: Seen) -> None:
    def hook(module: nn.Module, gave: Any, got: Any) -> None:
        raise KeyError("the hook's own")

    model.second.register_full_backward_hook(hook)


def life(setup: Setup, budget: float | str | None, profile: str) -> Any:
    torch.manual_seed(0)
    model, seen = Net(), []
    setup(model, seen)
    run: nn.Module = model
    if budget is not None:
        x = torch.randn(64, 16, requires_grad=True)
        options: Any = {"profile": profile, "on_miss": "raise", "cache": False}
        run = rekindle.rematerialize(model, x, budget=budget, time_limit_s=5, **options)
        assert not seen
    torch.manual_seed(1)
    found: list[Any] = []
    for _ in range(3):
        try:
            run(torch.randn(64, 16, requires_grad=True)).square().mean().backward()
        except KeyError as error:
            found.append(str(error))
            model.zero_grad()  # of a backward that broke off, nobody needs a part
        found += [p.grad for p in model.parameters()] + seen
        seen.clear()
        model.zero_grad()
    return found


@pytest.mark.parametrize(("budget", "profile"), [(1.0, "measure"), ("min", "estimate")])
@pytest.mark.parametrize("setup", [collects, changes, differentiates, of_a_shared_module, raises])
def test_hooks_are_called_as_eager_calls_them(
    setup: Setup, budget: float | str, profile: str
) -> None:
    expected, got = life(setup, None, profile), life(setup, budget, profile)
    assert len(expected) == len(got)
    for then, now in zip(expected, got, strict=True):
        assert torch.equal(then, now) if isinstance(then, Tensor) else then == now


def managed(model: nn.Module) -> nn.Module:
    x = torch.randn(64, 16, requires_grad=True)
    return rekindle.rematerialize(model, x, budget=1.0, profile="estimate", on_miss="raise")


def test_a_hook_that_goes_before_the_backward_is_missed_by_name() -> None:
    model = Net()
    handle = model.second.register_full_backward_hook(lambda module, gave, got: None)
    out = managed(model)(torch.randn(64, 16, requires_grad=True))
    handle.remove()
    with pytest.raises(PlanMismatch, match="a backward hook was removed"):
        out.sum().backward()


def test_a_gradient_of_another_shape_is_refused() -> None:
    model = Net()
    model.second.register_full_backward_hook(lambda module, gave, got: (gave[0].sum(),))
    with pytest.raises(PlanMismatch, match=r"returned \[\] of torch.float32 as the gradient"):
        managed(model)(torch.randn(64, 16, requires_grad=True)).sum().backward()


def test_a_plan_keeps_no_hooked_module_alive() -> None:
    model = Net()
    collects(model, [])
    run = managed(model)
    run(torch.randn(64, 16, requires_grad=True)).sum().backward()
    module = weakref.ref(model.second)
    del run, model
    gc.collect()
    assert module() is None
