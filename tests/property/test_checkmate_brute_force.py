"""`checkmate` against brute force over its own space: staged schedules in listed order."""

import random

import pytest
from support.staged_brute_force import budget_between, cheapest_by_force, small_problem

from rekindle.core import Schedule, Status, keep_all, simulate
from rekindle.solve import run_solver
from rekindle.solve.staged.checkmate import Checkmate, cheapest_staged, saved_at_loss

CASES = [(seed, part) for seed in range(40) for part in (0.25, 0.6)]


@pytest.mark.parametrize(("seed", "part"), CASES)
def test_equals_brute_force(seed: int, part: float) -> None:
    problem = small_problem(seed, 6)
    budget = budget_between(problem, part)
    solution = run_solver(Checkmate(), problem, budget, time_limit_s=60)
    best = cheapest_by_force(problem, lambda s: simulate(problem, s).peak <= budget)
    if best is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.message.startswith("proven")
    else:
        assert solution.status is Status.OPTIMAL
        assert solution.schedule is not None
        assert simulate(problem, solution.schedule).cost == best == solution.bound


@pytest.mark.parametrize("seed", range(1000, 1015))
def test_nothing_of_eight_ops_is_cheaper(seed: int) -> None:
    problem = small_problem(seed, 8)
    for part in (0.5, 0.75, 1.0):
        # Where there is no schedule the whole space would have to be walked: take more memory.
        budget = budget_between(problem, part)
        solution = run_solver(Checkmate(), problem, budget, time_limit_s=60)
        if solution.schedule is not None:
            break
    assert solution.schedule is not None
    cost = simulate(problem, solution.schedule).cost
    assert solution.status is Status.OPTIMAL
    assert cheapest_by_force(problem, lambda s: simulate(problem, s).peak <= budget, cost) is None


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_what_is_saved_across_the_loss(seed: int) -> None:
    problem = small_problem(seed, 6)
    rng = random.Random(seed)
    peak = budget_between(problem, rng.random())
    save = rng.randint(0, max(1, saved_at_loss(problem, keep_all(problem))))

    def fits(schedule: Schedule) -> bool:
        within = simulate(problem, schedule).peak <= peak
        return within and saved_at_loss(problem, schedule) <= save

    result = cheapest_staged(problem, peak, save_budget=save, time_limit_s=60)
    best = cheapest_by_force(problem, fits)
    if best is None:
        assert result.infeasible
        assert result.schedule is None
    else:
        assert result.optimal
        assert result.schedule is not None
        assert fits(result.schedule)
        assert simulate(problem, result.schedule).cost == best == result.bound
