"""Data parallel training: one plan, made by rank 0 and applied by all ranks.

Every rank of a group calls `rematerialize` of this module at the same time, before
DistributedDataParallel wraps the model. The budgets of all ranks are gathered and the smallest
counts. Rank 0 profiles and solves. The plan is broadcast as the JSON of a plan file, and each rank
applies it only if its own graph is the one that the plan was made for. An error on one rank is
raised on all of them, so that no rank waits forever in a collective.

A device budget leaves room for the gradient buckets that DistributedDataParallel allocates in
addition to the gradients. Pass `ranks=1` with `gradient_as_bucket_view=True`, which has none.

Later plans (`on_miss="replan"`) are made by each rank alone: other ranks may not see the same
shapes. Schedules may then differ between ranks; gradients do not depend on the schedule.

`fully_shard` and pipeline stages do not need this module: manage the block or the stage first.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rekindle.core import MIN_BUDGET, is_fraction, parse_budget
from rekindle.core.budget import budget_of_bytes
from rekindle.errors import BudgetInfeasible, PlanMismatch, RekindleError
from rekindle.pipeline import device_budget
from rekindle.plan_object import Plan, make_plan, manage_plan
from rekindle.plans.options import Options, as_args
from rekindle.plans.plan_files import plan_from_json, plan_to_json


def rematerialize(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    group: Any = None,
    inplace: bool = False,
    **options: Any,
) -> nn.Module:
    """`rekindle.rematerialize` on every rank of the group, with the same plan on all of them."""
    args, kwargs = as_args(args), kwargs or {}
    if several_ranks():
        ranks = dist.get_world_size(group)
        with _own_device(model):  # one rank may be given what it has to refuse
            given = _on_every_rank(lambda: Options(**{"ranks": ranks, **options}), group)
    else:
        given = Options(**options)
    plan = shared_plan(given, model, args, kwargs, group=group)
    return manage_plan(plan.options, plan, model, args, kwargs, inplace=inplace)


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class FirstTogether:
    """The planner of a module that a trainer with several ranks manages without a sample: the ranks
    make the plan of their first call together, later plans alone."""

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
    """The plan of all ranks; every rank must call this. With `alone_if_unlike`, a rank whose graph
    differs, as with batches padded to different lengths, makes its own plan for that budget."""
    if not several_ranks():
        return make_plan(options, model, args, kwargs)
    with _own_device(model):
        return _shared_plan(options, model, args, kwargs, group, alone_if_unlike)


def _own_device(model: nn.Module) -> Any:
    """NCCL sends pickled objects through the current device: it must be this rank's own."""
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _shared_plan(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    group: Any,
    alone_if_unlike: bool,
) -> Plan:
    wanted = _gather(lambda: _budget(options, model, args, kwargs), group)
    options = dataclasses.replace(options, budget=_smallest(wanted), device_budget=None)
    # One rank plans: two that plan alike could still find different schedules under a time limit.
    first = dist.get_rank(group) == 0
    plan: Plan | None = None
    box: list[Any] = [None]
    if first:
        try:
            plan = make_plan(options, model, args, kwargs)
            box[0] = {"plan": json.dumps(plan_to_json(plan.record))}
        except Exception as error:
            # The other ranks already wait in the broadcast: they need an answer before this rank
            # raises. If sending fails as well, the first error is the one to report.
            box[0] = {"error": _RankError.of(error)}
            with contextlib.suppress(Exception):
                _broadcast(box, group)
            raise
    box = _broadcast(box, group)
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

    # Together: a rank that fails alone would leave the others waiting in the first all-reduce.
    if not alone_if_unlike:
        return _on_every_rank(applied, group)
    try:
        return applied()
    except PlanMismatch:
        return make_plan(options, model, args, kwargs)


T = TypeVar("T")
# ("bytes", n), ("fraction", f) or ("min", 0). A fraction is gathered as such: it is resolved
# against the keep-all peak of the graph, which exists only after rank 0 has captured it.
Wanted = tuple[str, int | float]


def _budget(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Wanted:
    if options.device_budget is not None:
        given = device_budget(options, model, args, kwargs, next(model.parameters()).device)
        return "bytes", given.step_bytes
    budget = options.budget
    if budget is None:
        raise TypeError(
            "this rank was given no budget; give one (bytes, '8GiB', or a fraction such as 0.5) to "
            "every rank"
        )
    if budget == MIN_BUDGET:
        return MIN_BUDGET, 0
    if is_fraction(budget):
        parse_budget(budget, 1)  # raises InvalidBudget for a fraction out of range
        return "fraction", float(budget)
    return "bytes", parse_budget(budget, 1)


def _smallest(wanted: Sequence[Wanted]) -> str | int | float:
    kinds = {kind for kind, _ in wanted}
    if len(kinds) > 1:
        raise PlanMismatch(
            'some ranks give a budget in bytes and some a fraction or "min"; give all of them the '
            "same kind"
        )
    if kinds == {MIN_BUDGET}:
        return MIN_BUDGET
    least = min(amount for _, amount in wanted)
    return budget_of_bytes(int(least)) if kinds == {"bytes"} else least


# ---- ranks that fail together


@dataclass(frozen=True, slots=True)
class _RankError:
    """An error as it is sent to the other ranks."""

    # As text: an exception of a user's class may not unpickle in another process.

    name: str
    text: str
    smallest: int | None = None

    @staticmethod
    def of(error: Exception) -> "_RankError":
        smallest = getattr(error, "smallest_peak_bytes", None)
        return _RankError(type(error).__name__, str(error), smallest)

    def as_error(self, rank: int) -> RekindleError:
        sentence = f"rank {rank}: {self.text}"
        if self.name == BudgetInfeasible.__name__:
            return BudgetInfeasible(sentence, self.smallest)
        if self.name == PlanMismatch.__name__:
            return PlanMismatch(sentence)
        return RekindleError(f"rank {rank}: {self.name}: {self.text}")


def _gather(make: Callable[[], Any], group: Any) -> list[Any]:
    """The results of `make` on all ranks, in rank order; raises on all ranks if one fails."""
    mine: Any = None
    failed: Exception | None = None
    try:
        mine = make()
    except Exception as error:
        failed = error
    # The error travels beside the results: a rank that raised before would hang all others here.
    error_here = None if failed is None else _RankError.of(failed)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (mine, error_here), group=group)
    if failed is not None:
        raise failed
    for rank, (_, error_there) in enumerate(everyone):
        if error_there is not None:
            raise error_there.as_error(rank)
    return [value for value, _ in everyone]


def _on_every_rank(make: Callable[[], T], group: Any) -> T:
    """The result of `make` on this rank; raises on all ranks if one fails."""
    made: list[T] = []

    def locally() -> None:
        made.append(make())

    _gather(locally, group)
    return made[0]


def _broadcast(box: list[Any], group: Any) -> list[Any]:
    # `src` is a rank of the world, not of the group.
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(box, src=source, group=group)
    return box
