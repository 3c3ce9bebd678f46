"""One call that manages a model under a named schedule and refuses to fall back to eager."""

from collections.abc import Callable
from typing import Any

import torch
from support.compare import Record, assert_same, train
from support.schedules import SCHEDULES, Scheduler
from support.zoo import Example, Inputs
from torch import Tensor, nn

import rekindle


def manage(example: Example, schedule: str | Scheduler = "keep-all", **options: Any) -> nn.Module:
    """The managed module; a call that its plan does not cover raises, so that a comparison with
    eager can never be one of eager with itself."""
    args, kwargs = example.inputs(0)
    if isinstance(schedule, str):
        schedule = SCHEDULES[schedule]
    options = {"on_miss": "raise", "schedule": schedule, "profile": "estimate", **options}
    return rekindle.rematerialize(example.model, args, kwargs, **options)


def example_of(
    model: nn.Module,
    inputs: Callable[[int], Inputs] | Callable[[int], Tensor],
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: str = "sgd",
) -> Example:
    """An example of a model that takes one tensor, or what `inputs` says."""

    def full(step: int) -> Inputs:
        got = inputs(step)
        return ((got,), {}) if isinstance(got, Tensor) else got

    return Example(
        model.train(), full, loss or (lambda out: out.square().mean()), optimizer=optimizer
    )


def assert_trains_alike(
    make: Callable[[], Example], schedule: str, device: torch.device, **options: Any
) -> tuple[nn.Module, Record]:
    """Three steps, eager and managed, equal to the bit. `make` builds the example anew."""
    expected = train(make())
    again = train(make()) if device.type == "cuda" else None
    example = make()
    managed = manage(example, schedule, **options)
    got = train(example, managed)
    assert_same(expected, got, again)
    return managed, got
