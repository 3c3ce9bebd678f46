"""The bound over several moments never lies above the optimum over all schedules."""

import random

import pytest
from support import brute_force

from rekindle.core import check_schedule, keep_all, simulate
from rekindle.core.generate import random_problem
from rekindle.solve.base import without_dead_ops
from rekindle.solve.lower_bound import best_moment
from rekindle.solve.moment_chain import ancestors, chain_bound, descendants


def small(seed):
    problem, _ = without_dead_ops(random_problem(seed, 6, inplace=0.4))
    total = sum(op.cost for op in problem.ops)
    lowest = brute_force.smallest_peak(problem).peak
    highest = simulate(problem, keep_all(problem)).peak
    budgets = {lowest: 0, (lowest + highest) // 2: 0}
    for budget in budgets:
        best = brute_force.cheapest(problem, budget)
        budgets[budget] = best.cost - total
    return problem, budgets


@pytest.mark.parametrize("seed", range(40))
def test_never_above_the_optimum(seed):
    problem, budgets = small(seed)
    rng = random.Random(seed)
    total = sum(op.cost for op in problem.ops)
    for budget, optimum in budgets.items():
        first = rng.randrange(len(problem.ops))
        found = chain_bound(problem, budget, first, 20.0, 10**9)
        assert not found.infeasible
        assert found.extra <= optimum
        assert chain_bound(problem, budget, first, 20.0, 1).extra <= min(1, optimum)
        if found.schedule is not None:
            check_schedule(problem, found.schedule)
            trace = simulate(problem, found.schedule)
            assert trace.peak <= budget
            assert trace.cost - total == optimum
        for before, after in zip(found.moments, found.moments[1:], strict=False):
            assert before in ancestors(problem, after)
            assert after in descendants(problem, before)


def test_mostly_the_optimum():
    """From the moment of the bound over one, which is improved upon often."""
    met = better = cases = 0
    for seed in range(40):
        problem, budgets = small(seed)
        for budget, optimum in budgets.items():
            extra, _, moment = best_moment(problem, budget, 10.0)
            if moment is None or optimum == extra:
                continue
            found = chain_bound(problem, budget, moment, 20.0, optimum)
            assert found.extra <= optimum
            cases += 1
            met += found.extra == optimum
            better += found.extra > extra
    assert cases > 5
    assert better >= 0.6 * cases
    assert met >= 0.4 * cases


def test_a_budget_below_the_op_of_the_moment_is_infeasible():
    problem, budgets = small(1)
    floor = min(budgets)
    found = chain_bound(problem, floor // 4, len(problem.ops) - 1, 20.0, 10**9)
    assert found.infeasible
