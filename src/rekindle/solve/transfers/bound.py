"""A lower bound on the cost of any schedule within a budget that may move values.

Leave the transfers out of such a schedule of cost C. What is left is a schedule of recomputation
alone; it costs no more than C, and at each step it needs no more memory than before and the bytes
that were on the host and are fetched later. Three lanes: by the time t at most `to_host` * t bytes
were sent, and at most `from_host` * (C - t) can still come back, so that those bytes are at most
C * to_host * from_host / (to_host + from_host). Serial: each of them was sent and is fetched at the
cost of its time, and all of that together is at most C less what the ops cost that must run.

Let R(C) be that many bytes. If every schedule of recomputation within `budget` + R(C) costs more
than C, then none with transfers costs C or less. The largest such C is looked for by bisection; a
bound for recomputation that is weak makes it smaller, never wrong.

Known limits: latency, `least` and the order on the lanes are left out of account.
"""

import time

from rekindle.core import HostLink, Problem
from rekindle.solve.base import without_dead_ops
from rekindle.solve.lower_bound import cost_bound

TRIALS = 7  # of the bisection: it ends within a hundredth of the way


def least_cost(problem: Problem) -> int:
    """What nothing can undercut: each op that is needed runs once."""
    return sum(op.cost for op in without_dead_ops(problem)[0].ops)


def transfer_bound(problem: Problem, budget: int, cost: int, time_limit_s: float) -> int:
    """The largest bound found, where a schedule of this cost within the budget is known."""
    link = problem.transfers
    assert link is not None
    deadline = time.monotonic() + time_limit_s
    least = least_cost(problem)
    low, high = least, cost  # `low` is proven
    for trial in range(TRIALS):
        left = deadline - time.monotonic()
        if high - low <= 1 or left <= 0:
            break
        # The first trial tells whether anything can be proven at all.
        tried = low if trial == 0 else (low + high) // 2
        found = cost_bound(problem, budget + relief(link, tried, least), left / (TRIALS - trial))
        if found is None or found > tried:
            low = tried + 1
        elif trial == 0:
            break
        else:
            high = tried
    return low


def relief(link: HostLink, cost: int, least: int) -> int:
    """How many bytes can be on the host, and come back, at one moment of such a schedule."""
    # Rounded up: a bound may be too small, never too large.
    both = link.to_host + link.from_host
    time_ns = cost - least if link.serial else cost
    found = -(-time_ns * link.to_host * link.from_host // (both * 10**9))
    return found if link.host_budget is None else min(found, link.host_budget)
