"""What stays alive after a step: nothing, once its backward has run or its outputs are gone."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from support.manage import example_of, manage
from support.schedules import SCHEDULES
from support.zoo import gaussian
from torch import Tensor, nn

import rekindle

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    """What is freed must be freed without the collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Passing(torch.autograd.Function):
    """Passes a gradient on, or fails."""

    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail:
            raise ValueError("on purpose")
        return gradient, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x + 1).tanh()
        return self.third(torch.sigmoid(self.second(h)) * h)


def managed_net(schedule: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return manage(
        example_of(Net().to(device), lambda step: gaussian(step, device, 8, 16)), schedule
    )


def batches(device: torch.device, num: int = 4) -> tuple[list[Tensor], list[weakref.ref]]:
    xs = [gaussian(step, device, 8, 16) for step in range(num)]
    return xs, [weakref.ref(x) for x in xs]


def alive(refs: list[weakref.ref]) -> int:
    return sum(ref() is not None for ref in refs)


@EVERY_SCHEDULE
def test_e14_losses_in_a_list(schedule: str, device: torch.device) -> None:
    model = managed_net(schedule, device)
    xs, refs = batches(device)
    losses = []
    while xs:
        loss = model(xs.pop()).square().mean()
        loss.backward()
        losses.append(loss)
    assert alive(refs) == 0
    with pytest.raises(RuntimeError, match="second time"):
        losses[0].backward()


@EVERY_SCHEDULE
def test_e14_a_graph_that_is_kept_and_then_used_up(schedule: str, device: torch.device) -> None:
    model = managed_net(schedule, device)
    xs, refs = batches(device, 1)
    loss = model(xs.pop()).square().mean()
    loss.backward(retain_graph=True)
    assert alive(refs) == 1
    loss.backward()
    assert alive(refs) == 0


@EVERY_SCHEDULE
def test_e14_other_gradients_than_planned(schedule: str, device: torch.device) -> None:
    model = managed_net(schedule, device)
    xs, refs = batches(device, 2)
    for layout in (Tensor.contiguous, lambda t: t.t().contiguous().t()):
        out = model(xs.pop())
        out.backward(layout(torch.ones_like(out)))
        assert alive(refs) == len(xs)


@EVERY_SCHEDULE
@pytest.mark.parametrize("where", ["outside", "hook"])
def test_e14_errors_in_the_backward(where: str, schedule: str, device: torch.device) -> None:
    model = managed_net(schedule, device)
    xs, refs = batches(device, 3)

    def failing(_parameter: Tensor) -> None:
        raise ValueError("on purpose")

    hooks = []
    if where == "hook":
        last = next(iter(model.parameters()))  # ready when the backward has run
        hooks.append(last.register_post_accumulate_grad_hook(failing))
    losses = []
    while xs:
        loss = Passing.apply(model(xs.pop()), where == "outside").square().mean()
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        losses.append(loss)
    # What never ran may run again, as in eager: it goes with the loss.
    if where == "outside":
        assert alive(refs) == 3
    losses.clear()
    del loss
    assert alive(refs) == 0
    for hook in hooks:
        hook.remove()


@EVERY_SCHEDULE
def test_e14_steps_without_a_backward(schedule: str, device: torch.device) -> None:
    model = managed_net(schedule, device)
    xs, refs = batches(device)
    while xs:
        out = model(xs.pop())
    assert alive(refs) == 1
    del out
    assert alive(refs) == 0


def test_e14_errors_in_the_forward() -> None:
    """An op that fails when it runs, not when it is planned: an index beyond the table."""
    device = torch.device("cpu")  # a GPU would not survive it

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(8, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return self.linear(x * 2).tanh() + self.table(index)

    good = torch.zeros(8, dtype=torch.int64)
    example = example_of(Table(), lambda step: ((gaussian(step, device, 8, 16), good), {}))
    for schedule in SCHEDULES:
        model = manage(example, schedule)
        xs, refs = batches(device)
        while xs:
            with pytest.raises(IndexError):
                model(xs.pop(), good + 99)
        assert alive(refs) == 0


def test_e14_a_loss_that_is_kept_does_not_keep_the_plan():
    """Plans that are dropped for others would add up in a list of losses."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    managed = rekindle.rematerialize(model, args=(torch.randn(4, 8),), budget=1.0)
    loss = managed(torch.randn(4, 8)).sum()
    loss.backward()
    runner = weakref.ref(managed.plan.runner)
    del managed, model
    gc.collect()
    assert runner() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
