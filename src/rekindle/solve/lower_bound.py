"""Lower bounds on what any schedule within a budget costs, in any order, at any size.

`cpp/bound/bound.h` has the argument: at the moment an op first runs, every other op has run or
will, and what is still to be read is in memory, or is recomputed afterwards. Under the budget the
cheapest choice is a minimum cut for each price of memory. Here the moments are chosen; each gives a
bound, the largest counts.
"""

import bisect
import math
import time

from rekindle import _native
from rekindle.core import Problem, keep_all, simulate
from rekindle.solve.base import without_dead_ops

# Any moment gives a valid bound: what is chosen here decides how tight the best one is and how long
# it takes, and nothing here can make a bound wrong.
FULLEST, SPREAD, NEAR, ANY = 6, 32, 40, 256  # moments


def cost_bound(problem: Problem, budget: int, time_limit_s: float) -> int | None:
    """A lower bound on the cost of any schedule within the budget; None if there is none."""
    # The costs below are of ops that every schedule runs; a dead op need not be among them.
    small, _ = without_dead_ops(problem)
    extra, infeasible = best_bound(small, budget, time_limit_s)
    return None if infeasible else sum(op.cost for op in small.ops) + extra


def best_bound(problem: Problem, budget: int, time_limit_s: float) -> tuple[int, bool]:
    """A lower bound on the cost above keep-all, and whether the budget is proven too small."""
    extra, infeasible, _ = best_moment(problem, budget, time_limit_s)
    return extra, infeasible


def best_moment(problem: Problem, budget: int, time_limit_s: float) -> tuple[int, bool, int | None]:
    """The same, with the op whose first run is the moment of the bound, if there is one."""
    deadline = time.monotonic() + time_limit_s
    moments = _Moments(problem)
    best, price = 0.0, 0.0
    while (op_id := moments.next()) is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        # The best price of memory changes little between moments that are near each other: it is
        # where the next search begins. A moment is left as soon as it cannot beat `best`.
        extra, infeasible, at_price, _ = _native.bound_at(
            problem.native, op_id, budget, left, price=price, least=best
        )
        if infeasible:
            return 0, True, op_id
        if extra > best:
            best, price = extra, at_price
            moments.improved(op_id)
    # Costs are whole numbers, so what lies above a whole number is the next one.
    return math.ceil(best - 1e-6), False, moments.best if moments.best >= 0 else None


class _Moments:
    """Which op is tried next: the loss, the ops at which keep-all has the most memory, some spread
    over the listed order, and then what is listed nearest to the best so far, until `NEAR` of those
    in a row have brought nothing (`ANY` of any, where nothing has brought anything)."""

    def __init__(self, problem: Problem) -> None:
        num_ops = len(problem.ops)
        # Where keep-all has the most memory the budget takes away the most, so the price is high.
        memory = simulate(problem, keep_all(problem)).memory
        first = [problem.loss_op] if problem.loss_op is not None else []
        fullest_first = sorted(range(num_ops), key=lambda i: -memory[i])
        count = min(num_ops, SPREAD)
        chosen = {(2 * k + 1) * num_ops // (2 * count) for k in range(count)}
        most, spread = fullest_first[:FULLEST], [i for i in fullest_first if i in chosen]
        self.todo = list(dict.fromkeys([*first, *most, *spread]))[::-1]
        self.left = sorted(set(range(num_ops)) - set(self.todo))
        self.best, self.in_vain = -1, 0

    def next(self) -> int | None:
        if self.todo:
            return self.todo.pop()
        if not self.left or self.in_vain == (NEAR if self.best >= 0 else ANY):
            return None
        self.in_vain += 1
        # Nothing has given a bound yet, so no place is better than another.
        if self.best < 0:
            return self.left.pop(len(self.left) // 2)
        # The nearest on either side of the best so far, in listed order: the bounds of neighbouring
        # moments are alike.
        k = bisect.bisect(self.left, self.best)
        if k == len(self.left) or (
            k > 0 and self.best - self.left[k - 1] <= self.left[k] - self.best
        ):
            k -= 1
        return self.left.pop(k)

    def improved(self, op_id: int) -> None:
        self.best, self.in_vain = op_id, 0
