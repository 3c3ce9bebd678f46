"""`plan` and `rematerialize`: the functions that most users call.

Their keyword arguments are the fields of `Options`, spelled out for readers and type checkers; a
test compares the two. `pipeline` has the stages behind them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import nn

from rekindle.errors import CaptureError
from rekindle.plan_object import Plan, make_plan, manage_plan
from rekindle.plans.options import (
    DEFAULTS,
    Budget,
    Dynamic,
    Kernels,
    OnMiss,
    Options,
    Patterns,
    ScheduleSource,
    as_args,
)
from rekindle.profile import ProfileListener
from rekindle.runtime.managed_module import with_loss_args
from rekindle.solve.base import Solver


def plan(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = DEFAULTS.budget,
    solver: str | Solver = DEFAULTS.solver,
    time_limit_s: float = DEFAULTS.time_limit_s,
    gap: float = DEFAULTS.gap,
    seed: int = DEFAULTS.seed,
    profile: Literal["estimate", "measure"] = DEFAULTS.profile,
    loss_fn: Callable[..., Any] | None = DEFAULTS.loss_fn,
    loss_args: Sequence[Any] | None = None,
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
    arena: bool = DEFAULTS.arena,
    kernels: Kernels = DEFAULTS.kernels,
    best_effort: bool = DEFAULTS.best_effort,
    remeasure: bool = DEFAULTS.remeasure,
    offload: str | bool = DEFAULTS.offload,
    fullgraph: bool = DEFAULTS.fullgraph,
    count_gradients: bool = DEFAULTS.count_gradients,
) -> Plan:
    """A plan for `model(*args, **kwargs)` within the budget. The model is captured on fake tensors.
    Ops that no earlier run has measured are measured in a step on the sample, which leaves
    parameters, buffers, gradients and random streams as they were. With `profile="estimate"` or
    `device_profile` nothing runs. `args` is a tuple; anything else, such as a tensor, is the only
    argument.

    `budget` limits what a training step adds to what is resident (parameters, buffers, inputs):
    bytes, "8GiB", a fraction of the peak when everything is saved (0.5), or "min", the smallest
    that is found. With `best_effort=True`, a budget that cannot be met becomes the smallest found.
    The search takes at most `time_limit_s` and ends where the cost is proven to be within `gap` of
    the optimum (0.001 is 0.1 %).
    `device_budget` limits the whole device ("auto": what is free now): residents, the state of
    `optimizer` (an optimizer, or a name such as "adamw") and `headroom` are subtracted from it.
    `device_profile` names a device description to plan for instead of this machine's device.
    `hold_outputs=False` assumes that the caller drops all outputs but the loss before the backward,
    as `model(...).loss.backward()` does. With `count_gradients=False` the gradients of parameters
    come on top of `budget`, as where they are allocated already.
    `loss_fn(output, *loss_args)` becomes part of the call, which then returns the loss:
    `managed(x, loss_args=(target,))`; `loss_args` here are the sample's. The memory of a loss that
    is computed outside is not counted, except for the gradients that it passes back.
    `save` and `recompute` force ops to be saved (they run once) or recomputed (their results are
    not kept for the backward), by module path ("blocks.*.mlp"), op ("aten.mm*") or both
    ("blocks.*::mm"). `cache=False` neither reads nor writes cached costs and solutions;
    `remeasure=True` measures all costs anew and replaces the cached ones, as after planning on a
    busy machine. With several `ranks`, a device budget leaves room for the gradient buckets of
    DistributedDataParallel.
    `cuda_graph=True` runs the step as a CUDA graph: no launch overhead, and the step's memory stays
    reserved. `fuse=False` does not fuse chains of elementwise ops on a GPU. `arena=True` lets
    steps on a GPU allocate from segments of their own, so that less is reserved.
    `kernels="inductor"` runs torch.compile's kernels, with its numbers instead of eager's;
    `"auto"` takes whichever is faster within the budget.
    `offload="auto"` lets the plan of a model on a GPU move values to host memory and back beside
    the ops, where that is faster than recomputing them; "host_budget 32GiB" with at most so much
    host memory, also for a model that is on a CPU and a `device_profile`.
    `fullgraph=True` refuses a model whose code cannot be read in one piece, as `torch.compile` does
    with this option.
    """
    options = _options(locals())
    kwargs = with_loss_args(model, kwargs, loss_fn, loss_args)
    return make_plan(options, model, as_args(args), kwargs)


def rematerialize(
    model: nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = DEFAULTS.budget,
    solver: str | Solver = DEFAULTS.solver,
    time_limit_s: float = DEFAULTS.time_limit_s,
    gap: float = DEFAULTS.gap,
    seed: int = DEFAULTS.seed,
    profile: Literal["estimate", "measure"] = DEFAULTS.profile,
    inplace: bool = False,
    on_miss: OnMiss = DEFAULTS.on_miss,
    max_plans: int = DEFAULTS.max_plans,
    dynamic: Dynamic = DEFAULTS.dynamic,
    loss_fn: Callable[..., Any] | None = DEFAULTS.loss_fn,
    loss_args: Sequence[Any] | None = None,
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
    arena: bool = DEFAULTS.arena,
    kernels: Kernels = DEFAULTS.kernels,
    best_effort: bool = DEFAULTS.best_effort,
    remeasure: bool = DEFAULTS.remeasure,
    offload: str | bool = DEFAULTS.offload,
    fullgraph: bool = DEFAULTS.fullgraph,
    count_gradients: bool = DEFAULTS.count_gradients,
) -> nn.Module:
    """A managed module: the same model, whose training step stays within the budget. Its outputs
    and gradients are bitwise identical to the model's. Options are those of `plan`.

    Without `args` and `kwargs`, the first call with gradients is planned when it happens. Another
    call that no plan covers (other shapes, dtypes or mode) runs eagerly and warns
    (`on_miss="eager"`), is planned too (`"replan"`, keeping at most `max_plans` plans) or raises
    (`"raise"`). With `dynamic=True`, calls that differ in sizes alone are covered by one family of
    plans, captured at the second shape; `{"input_ids": {1: (2, 4096)}}` names sizes that change.
    """
    options = _options(locals())
    if args is None and kwargs is None:
        if loss_args is not None:
            raise TypeError(
                "loss_args were given without args: they are part of a sample; give both, or "
                "neither and let the first call be planned"
            )
        return manage_plan(options, None, model, inplace=inplace)
    args, kwargs = as_args(args), with_loss_args(model, kwargs, loss_fn, loss_args)
    try:
        first = make_plan(options, model, args, kwargs)
    except CaptureError as error:  # its parts may be planned
        return manage_plan(options, error, model, inplace=inplace)
    return manage_plan(options, first, model, args, kwargs, inplace=inplace)


def _options(given: Mapping[str, Any]) -> Options:
    """The `Options` among the arguments of a call."""
    return Options(**{f.name: given[f.name] for f in fields(Options) if f.name in given})
