"""`plan` and `rematerialize`: what most users call. `planning.py` has the stages behind them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import nn

from rekindle.pipeline import MAX_PLANS, Budget, Options, Patterns, Plan, make_plan, manage_plan
from rekindle.predict import HEADROOM
from rekindle.profile import ProfileListener
from rekindle.runtime.managed_module import OnMiss
from rekindle.solve.base import Solver
from rekindle.solving import ScheduleSource


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    profile: Literal["estimate", "measure"] = "measure",
    loss_fn: Callable[..., Any] | None = None,
    schedule: ScheduleSource | None = None,
    device_budget: Budget | None = None,
    headroom: float | int | str = HEADROOM,
    optimizer: torch.optim.Optimizer | str | None = None,
    device_profile: str | None = None,
    on_progress: ProfileListener | None = None,
    hold_outputs: bool = True,
    save: Patterns = (),
    recompute: Patterns = (),
    cache: bool = True,
    ranks: int = 1,
    cuda_graph: bool = False,
    fuse: bool = True,
) -> Plan:
    """A plan for `model(*args, **kwargs)` within the budget; the model itself does not run.

    `budget` counts what a step adds to what is resident; `device_budget` the whole device ("auto":
    what is free now), of which the residents (with the state of `optimizer`, one that exists or a
    name such as "adamw") and the `headroom` are taken off. `device_profile` names a device
    description to plan for instead of this machine. `hold_outputs=False` takes it that the caller
    drops all outputs but the loss before the backward, as `model(...).loss.backward()` does.
    `loss_fn(output)` becomes a part of the call, which then returns the loss: what a loss outside
    of it needs, beside the gradients that it gives, is not counted.
    `save` and `recompute` name ops that run once, and ops whose results are not kept for the
    backward, by module path ("blocks.*.mlp"), op ("aten.mm*"), or both ("blocks.*::mm").
    `cache=False` solves anew, and keeps nothing. With several `ranks` a device budget leaves room
    for the gradient buckets of DistributedDataParallel. `cuda_graph=True` records the step and
    replays it: no time between kernels, and the memory of the step stays reserved. `fuse=False`
    leaves chains of elementwise ops on a GPU as the kernels that eager runs.
    """
    given = dict(locals())
    options = _options(given)
    return make_plan(options, model, args, kwargs or {})


def rematerialize(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    profile: Literal["estimate", "measure"] = "measure",
    inplace: bool = False,
    on_miss: OnMiss = "eager",
    max_plans: int = MAX_PLANS,
    loss_fn: Callable[..., Any] | None = None,
    schedule: ScheduleSource | None = None,
    device_budget: Budget | None = None,
    headroom: float | int | str = HEADROOM,
    optimizer: torch.optim.Optimizer | str | None = None,
    device_profile: str | None = None,
    on_progress: ProfileListener | None = None,
    hold_outputs: bool = True,
    save: Patterns = (),
    recompute: Patterns = (),
    cache: bool = True,
    ranks: int = 1,
    cuda_graph: bool = False,
    fuse: bool = True,
) -> nn.Module:
    """The same model, whose step never needs more than the budget; options as for `plan`.

    Without `args` and `kwargs` the first call with gradients is planned, when it comes. A later
    call of another kind (shapes, dtypes, mode) runs eagerly, is planned too (`on_miss="replan"`,
    at most `max_plans` kept) or raises.
    """
    given = dict(locals())
    options = _options(given)
    if args is None and kwargs is None:
        return manage_plan(options, None, model, (), {}, inplace, on_miss, max_plans)
    args, kwargs = args or (), kwargs or {}
    first = make_plan(options, model, args, kwargs)
    return manage_plan(options, first, model, args, kwargs, inplace, on_miss, max_plans)


def _options(given: Mapping[str, Any]) -> Options:
    """The options among the arguments of a call."""
    options = Options(**{f.name: given[f.name] for f in fields(Options)})
    _ = options.wishes  # refused now, not after a minute of measuring
    return options
