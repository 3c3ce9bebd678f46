"""Several ranks on PyTorch's own engine: one plan, made once, run by all.

`rematerialize` is the one of `rekindle`, called by every rank of a group at once, before
DistributedDataParallel wraps the model. The budgets of all ranks are gathered and the smallest
counts; the first rank profiles and solves; the plan travels as the JSON of a plan file, and each
rank applies it only if its own graph is the one it was made for. An error of one rank is raised by
all, so that none is left waiting.

A device budget leaves room for the gradient buckets that DistributedDataParallel allocates beside
the gradients, unless you say `ranks=1`, which is right with `gradient_as_bucket_view=True`.

What is planned later (`on_miss="replan"`) is planned by each rank for itself: another rank may not
see the same shapes. Schedules may then differ; gradients do not depend on them.

`fully_shard` and pipeline stages need nothing of this module: manage the block or the stage first.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rekindle.core import is_fraction, parse_budget
from rekindle.errors import BudgetInfeasible, PlanMismatch, RekindleError
from rekindle.pipeline import device_budget
from rekindle.plan_object import Plan, make_plan, manage_plan
from rekindle.plans.options import Options
from rekindle.plans.plan_files import plan_from_json, plan_to_json


def rematerialize(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    group: Any = None,
    inplace: bool = False,
    **options: Any,
) -> nn.Module:
    """`rekindle.rematerialize` on every rank of the group, with one plan for all."""
    kwargs = kwargs or {}
    ranks = dist.get_world_size(group) if several_ranks() else 1
    given = Options(**{"ranks": ranks, **options})
    plan = shared_plan(given, model, args, kwargs, group=group)
    return manage_plan(plan.options, plan, model, args, kwargs, inplace=inplace)


def several_ranks() -> bool:
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class FirstTogether:
    """How a module that was managed without a sample plans under a trainer of several ranks: the
    first call with all of them, who train in step, and what comes later alone."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.is_first = True

    def __call__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        first: Plan | None = None,
    ) -> Plan:
        together, self.is_first = self.is_first, False
        if not together:
            return make_plan(self.options, model, args, kwargs, first)
        plan = shared_plan(self.options, model, args, kwargs, alone_if_unlike=True)
        self.options = plan.options
        return plan


def shared_plan(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    group: Any = None,
    alone_if_unlike: bool = False,
) -> Plan:
    """The plan of all ranks; every rank must call this. `alone_if_unlike`: ranks whose graphs
    differ, as with batches padded to different lengths, plan for themselves, for that budget."""
    if not several_ranks():
        return make_plan(options, model, args, kwargs)
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    # Objects travel through the current device: on a GPU, each rank's own.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return _shared_plan(options, model, args, kwargs, group, alone_if_unlike)


def _shared_plan(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    group: Any,
    alone_if_unlike: bool,
) -> Plan:
    wanted = _same_for_all(lambda: _budget(options, model, args, kwargs), group)
    options = dataclasses.replace(options, budget=_smallest(wanted), device_budget=None)
    first = dist.get_rank(group) == 0
    plan: Plan | None = None
    box: list[Any] = [None]
    if first:
        try:
            plan = make_plan(options, model, args, kwargs)
            box[0] = {"plan": json.dumps(plan_to_json(plan.record))}
        except Exception as error:
            box[0] = {"error": _Told.of(error)}
            with contextlib.suppress(Exception):
                _send(box, group)
            raise
    box = _send(box, group)
    if "error" in box[0]:
        raise box[0]["error"].as_error(0)

    def applied() -> Plan:
        if plan is not None:
            return plan
        record = plan_from_json(json.loads(box[0]["plan"]), "the plan of rank 0")
        mine = Plan(record).plan_for(model, args, kwargs, loss_fn=options.loss_fn)
        assert mine.captured is not None
        captured = dataclasses.replace(mine.captured, options=options)
        return dataclasses.replace(mine, captured=captured)

    if not alone_if_unlike:
        return _own(applied, group)
    try:
        return applied()
    except PlanMismatch:
        return make_plan(options, model, args, kwargs)


Wanted = tuple[str, int | float]  # ("bytes", n) or ("fraction", f)


def _budget(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Wanted:
    if options.device_budget is not None:
        given = device_budget(options, model, args, kwargs, next(model.parameters()).device)
        return "bytes", given.step_bytes
    budget = options.budget
    if budget is None:
        raise TypeError("give a budget (bytes, '8GiB', or a fraction such as 0.5) to every rank")
    if is_fraction(budget):
        parse_budget(budget, 1)  # refused here where it is out of range
        return "fraction", float(budget)
    return "bytes", parse_budget(budget, 1)


def _smallest(wanted: Sequence[Wanted]) -> int | float:
    kinds = {kind for kind, _ in wanted}
    if len(kinds) > 1:
        raise PlanMismatch(
            "some ranks give a budget in bytes and some a fraction; give all of them the same kind"
        )
    return min(amount for _, amount in wanted)


# ---- ranks that fail together


@dataclass(frozen=True, slots=True)
class _Told:
    """An error on its way to the other ranks."""

    name: str
    text: str
    smallest: int | None = None

    @staticmethod
    def of(error: Exception) -> "_Told":
        smallest = getattr(error, "smallest_peak_bytes", None)
        return _Told(type(error).__name__, str(error), smallest)

    def as_error(self, rank: int) -> RekindleError:
        sentence = f"rank {rank}: {self.text}"
        if self.name == BudgetInfeasible.__name__:
            return BudgetInfeasible(sentence, self.smallest)
        if self.name == PlanMismatch.__name__:
            return PlanMismatch(sentence)
        return RekindleError(f"rank {rank}: {self.name}: {self.text}")


def _same_for_all(make: Callable[[], Any], group: Any) -> list[Any]:
    """What each rank makes, in the order of ranks; raises on all where one fails."""
    mine: Any = None
    failed: Exception | None = None
    try:
        mine = make()
    except Exception as error:
        failed = error
    told = None if failed is None else _Told.of(failed)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (mine, told), group=group)
    if failed is not None:
        raise failed
    for rank, (_, theirs) in enumerate(everyone):
        if theirs is not None:
            raise theirs.as_error(rank)
    return [value for value, _ in everyone]


def _own(make: Callable[[], Plan], group: Any) -> Plan:
    """What this rank makes; raises on all ranks where one fails. Plans do not travel."""
    made: list[Plan] = []

    def locally() -> None:
        made.append(make())

    _same_for_all(locally, group)
    return made[0]


def _send(box: list[Any], group: Any) -> list[Any]:
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(box, src=source, group=group)
    return box
