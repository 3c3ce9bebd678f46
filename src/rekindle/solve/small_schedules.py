"""What is known of how small a problem's peak can be: schedules that earlier searches found.

A search that ran out of luck or of time must not refuse a budget that another one has met. In this
process, schedules are known by the problem without its costs, which a new measurement changes; on
disk, they are the kept solutions of the same problem, whatever budget they were for.
"""

import dataclasses
import threading
from collections import OrderedDict

from rekindle.core import Problem, Schedule, Solution, Status, problem_hash, simulate
from rekindle.solve.constraints import Constraints
from rekindle.solve.registry import SOLVERS
from rekindle.solve.solution_cache import SolveRequest, solutions_of, store

MAX_PROBLEMS = 32
MAX_SCHEDULES = 8  # of one problem; the smallest stay

_known: OrderedDict[tuple[str, Constraints], tuple[Schedule, ...]] = OrderedDict()
_lock = threading.Lock()


def remember(
    problem: Problem, constraints: Constraints, schedule: Schedule, *, on_disk: bool = False
) -> None:
    """Keeps a schedule that meets the constraints, for later budgets of the same problem."""
    key = _key(problem, constraints)
    with _lock:
        known = {*_known.get(key, ()), schedule}
        peaks = {s: simulate(problem, s).peak for s in known}
        _known[key] = tuple(sorted(known, key=peaks.__getitem__)[:MAX_SCHEDULES])
        _known.move_to_end(key)
        while len(_known) > MAX_PROBLEMS:
            _known.popitem(last=False)
    if on_disk:
        # As the answer of a search without time: it serves nobody who has some, but is found here.
        found = Solution(
            status=Status.FEASIBLE,
            schedule=schedule,
            solver="smallest peak",
            stopped_by="time limit",
        )
        peak = simulate(problem, schedule).peak
        store(_request(problem, constraints, peak), found, 0.0)


def known_schedules(problem: Problem, constraints: Constraints, *, on_disk: bool) -> list[Schedule]:
    """Schedules of the problem that meet the constraints, found by whichever search."""
    with _lock:
        found = list(_known.get(_key(problem, constraints), ()))
    if on_disk:
        found += solutions_of(_request(problem, constraints, 0))
    return found


def _key(problem: Problem, constraints: Constraints) -> tuple[str, Constraints]:
    ops = tuple(dataclasses.replace(op, cost=0) for op in problem.ops)
    return problem_hash(dataclasses.replace(problem, ops=ops, name="")), constraints


def _request(problem: Problem, constraints: Constraints, budget: int) -> SolveRequest:
    # A seed that no search has, so that no search's own solution is replaced.
    return SolveRequest(problem, budget, SOLVERS[0], -1, (constraints.save, constraints.recompute))
