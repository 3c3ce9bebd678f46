"""What becomes of a plan whose first steps show that it was wrong (`step_watch`): it is corrected,
or it is kept and a line of the log says why."""

import functools
import logging
from typing import Any, Protocol

from rekindle.errors import BudgetInfeasible
from rekindle.runtime.shape_table import ShapePlan

log = logging.getLogger("rekindle")


class Manager(Protocol):
    """Of a managed module: what makes the other plan, by what was seen of a step."""

    correct_plan: Any

    def put(self, entry: Any, plan: Any) -> None:
        """Another plan in the place of that of an entry."""


class Entry(Protocol):
    """Where a managed module has its plan for one kind of call."""

    plan: Any


def follow_watch(manager: Manager, entry: Entry) -> None:
    """What the steps so far say of the plan. Calls that share it get the other one too."""
    runner = entry.plan.runner
    if isinstance(entry.plan, ShapePlan):
        entry.plan.family.follow_watch(entry.plan)
        return
    if runner.replacement is not None:
        manager.put(entry, runner.replacement)
        return
    if runner.watch is None:
        return
    runner.smaller_plan = functools.partial(_smaller_plan, manager, entry.plan)
    if runner.watch.excess is not None or runner.watch.is_over:
        _correct(manager, entry)


def _smaller_plan(manager: Manager, plan: Any, limit_bytes: int) -> Any:
    """For a step that ran out of memory, or None where no plan needs so much less."""
    try:
        smaller = manager.correct_plan(plan, limit_bytes, 0)
    except BudgetInfeasible as error:
        log.warning("a step ran out of memory, and no plan needs less: %s", error)
        return None
    log.warning(
        "a step ran out of memory and is repeated by a plan for %s: overhead %+.1f %% -> %+.1f %%",
        *(shown_size(limit_bytes), 100 * plan.overhead, 100 * smaller.overhead),
    )
    return smaller


def _correct(manager: Manager, entry: Entry) -> None:
    """The last step needed more than its budget: plan with what it needed, from now on."""
    runner = entry.plan.runner
    watch, runner.watch = runner.watch, None  # it is over, or the next plan has one of its own
    excess = watch.take()
    if excess is None:
        return
    limit = shown_size(watch.limit_bytes)
    seen = (
        f"a step used {shown_size(excess.peak_bytes)} in {excess.section}, with a budget of {limit}"
    )
    if watch.num_corrections == 0:
        log.warning("%s; the plan was corrected as often as it may be, and is kept", seen)
        return
    before = entry.plan.overhead
    try:
        plan = manager.correct_plan(entry.plan, excess, watch.num_corrections - 1)
    except BudgetInfeasible as error:
        log.warning("%s; no plan keeps that budget: %s", seen, error)
        return
    now = "" if plan.budget_bytes == watch.limit_bytes else f" for {shown_size(plan.budget_bytes)}"
    log.warning(
        *("%s; planned again%s: overhead %+.1f %% -> %+.1f %%", seen, now),
        *(100 * before, 100 * plan.overhead),
    )
    runner.replacement = plan  # a copy of the module shares the old one
    manager.put(entry, plan)


def shown_size(num_bytes: int) -> str:
    """A size in bytes, for a message."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} bytes"
