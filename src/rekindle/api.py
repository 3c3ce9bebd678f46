"""`plan` and `rematerialize`: what most users call.

Their keyword arguments are the fields of `Options`, spelled out for readers and type checkers;
`pipeline` has the stages behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import nn

from rekindle.plan_object import Plan, make_plan, manage_plan
from rekindle.plans.options import DEFAULTS, Budget, OnMiss, Options, Patterns, ScheduleSource
from rekindle.profile import ProfileListener
from rekindle.solve.base import Solver


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = DEFAULTS.budget,
    solver: str | Solver = DEFAULTS.solver,
    time_limit_s: float = DEFAULTS.time_limit_s,
    seed: int = DEFAULTS.seed,
    profile: Literal["estimate", "measure"] = DEFAULTS.profile,
    loss_fn: Callable[..., Any] | None = DEFAULTS.loss_fn,
    schedule: ScheduleSource | None = DEFAULTS.schedule,
    device_budget: Budget | None = DEFAULTS.device_budget,
    headroom: float | int | str = DEFAULTS.headroom,
    optimizer: torch.optim.Optimizer | str | None = DEFAULTS.optimizer,
    device_profile: str | None = DEFAULTS.device_profile,
    on_progress: ProfileListener | None = DEFAULTS.on_progress,
    hold_outputs: bool = DEFAULTS.hold_outputs,
    save: Patterns = DEFAULTS.save,
    recompute: Patterns = DEFAULTS.recompute,
    cache: bool = DEFAULTS.cache,
    ranks: int = DEFAULTS.ranks,
    cuda_graph: bool = DEFAULTS.cuda_graph,
    fuse: bool = DEFAULTS.fuse,
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
    return make_plan(_options(locals()), model, args, kwargs or {})


def rematerialize(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = DEFAULTS.budget,
    solver: str | Solver = DEFAULTS.solver,
    time_limit_s: float = DEFAULTS.time_limit_s,
    seed: int = DEFAULTS.seed,
    profile: Literal["estimate", "measure"] = DEFAULTS.profile,
    inplace: bool = False,
    on_miss: OnMiss = DEFAULTS.on_miss,
    max_plans: int = DEFAULTS.max_plans,
    loss_fn: Callable[..., Any] | None = DEFAULTS.loss_fn,
    schedule: ScheduleSource | None = DEFAULTS.schedule,
    device_budget: Budget | None = DEFAULTS.device_budget,
    headroom: float | int | str = DEFAULTS.headroom,
    optimizer: torch.optim.Optimizer | str | None = DEFAULTS.optimizer,
    device_profile: str | None = DEFAULTS.device_profile,
    on_progress: ProfileListener | None = DEFAULTS.on_progress,
    hold_outputs: bool = DEFAULTS.hold_outputs,
    save: Patterns = DEFAULTS.save,
    recompute: Patterns = DEFAULTS.recompute,
    cache: bool = DEFAULTS.cache,
    ranks: int = DEFAULTS.ranks,
    cuda_graph: bool = DEFAULTS.cuda_graph,
    fuse: bool = DEFAULTS.fuse,
) -> nn.Module:
    """The same model, whose step never needs more than the budget; options as for `plan`.

    Without `args` and `kwargs` the first call with gradients is planned, when it comes. A later
    call of another kind (shapes, dtypes, mode) runs eagerly, is planned too (`on_miss="replan"`,
    at most `max_plans` kept) or raises.
    """
    options = _options(locals())
    if args is None and kwargs is None:
        return manage_plan(options, None, model, inplace=inplace)
    args, kwargs = args or (), kwargs or {}
    first = make_plan(options, model, args, kwargs)
    return manage_plan(options, first, model, args, kwargs, inplace=inplace)


def _options(given: Mapping[str, Any]) -> Options:
    """The options among the arguments of a call."""
    return Options(**{f.name: given[f.name] for f in fields(Options) if f.name in given})
