"""Lower bounds on what any schedule within a budget costs, in any order, at any size.

`cpp/bound.cpp` has the argument: at the moment an op first runs, what its descendants still need is
in memory, or is made again afterwards. Under the budget the cheapest choice is a minimum cut for
each price of memory. Here the moments are chosen; each gives a bound, the largest counts.
"""

import math
import time

from rekindle import _native
from rekindle.core import Problem, Trace, keep_all, simulate
from rekindle.solve.base import without_dead_ops


def cost_bound(problem: Problem, budget: int, time_limit_s: float) -> int | None:
    """A lower bound on the cost of any schedule within the budget; None if there is none."""
    small, _ = without_dead_ops(problem)
    extra, infeasible = best_bound(small, budget, time_limit_s)
    return None if infeasible else sum(op.cost for op in small.ops) + extra


def best_bound(problem: Problem, budget: int, time_limit_s: float) -> tuple[int, bool]:
    """A lower bound on the cost above keep-all, and whether the budget is proven too small.

    Moments tried: the loss, then the ops at which keep-all has the most memory, then the rest
    spread evenly, as long as there is time.
    """
    deadline = time.monotonic() + time_limit_s
    trace = simulate(problem, keep_all(problem))
    best = 0.0
    for op_id in _moments(problem, trace):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        extra, infeasible, _, _ = _native.bound_at(problem.native, op_id, budget, left)
        if infeasible:
            return 0, True
        best = max(best, extra)
    # Costs are whole numbers, so what lies above a whole number is the next one.
    return math.ceil(best - 1e-6), False


def _moments(problem: Problem, trace: Trace) -> list[int]:
    by_memory = sorted(range(len(problem.ops)), key=lambda i: -trace.memory[i])
    count = min(len(by_memory), 64)
    spread = [by_memory[k * (len(by_memory) - 1) // max(1, count - 1)] for k in range(count)]
    first = [problem.loss_op] if problem.loss_op is not None else []
    return list(dict.fromkeys([*first, *by_memory[:8], *spread]))
