"""`moccasin` against brute force over its own spaces.

With the order kept: staged schedules with at most C runs of an op. Without it: every sequence in
which each op stands once to C times.
"""

import pytest
from support.staged_brute_force import budget_between, cheapest_by_force, small_problem

from rekindle.core import Problem, Schedule, Solution, Status, simulate
from rekindle.errors import InvalidSchedule
from rekindle.solve import run_solver
from rekindle.solve.staged.moccasin import Moccasin


def cheapest_sequence(problem: Problem, budget: int, max_runs: int) -> int | None:
    """The smallest cost over all valid sequences with 1 to `max_runs` runs of each op."""
    best: int | None = None
    produced = set(problem.resident)
    counts = [0] * len(problem.ops)
    # An op that makes a held value may run again after the loss only outside the space.
    held, loss = set(problem.held), problem.loss_op

    def walk(steps: list[int], cost: int) -> None:
        nonlocal best
        if best is not None and cost >= best:
            return
        if all(counts):
            try:
                if simulate(problem, Schedule(tuple(steps))).peak <= budget:
                    best = cost
                    return
            except InvalidSchedule:
                pass
        for i, op in enumerate(problem.ops):
            if counts[i] >= (1 if op.once else max_runs) or not produced.issuperset(op.inputs):
                continue
            if loss is not None and counts[loss] and held.intersection(op.outputs):
                continue
            new = [v for v in op.outputs if v not in produced]
            counts[i] += 1
            produced.update(new)
            walk([*steps, i], cost + op.cost)
            produced.difference_update(new)
            counts[i] -= 1

    walk([], 0)
    return best


@pytest.mark.parametrize("part", [0.2, 0.7])
@pytest.mark.parametrize("seed", range(3000, 3025))
def test_order_kept(seed: int, part: float) -> None:
    problem = small_problem(seed, 6)
    budget = budget_between(problem, part)
    solution = run_solver(Moccasin(), problem, budget, time_limit_s=60)

    def fits(schedule: Schedule) -> bool:
        trace = simulate(problem, schedule)
        return trace.peak <= budget and max(trace.runs) <= 2

    best = cheapest_by_force(problem, fits)
    assert_equals(problem, solution, best)


@pytest.mark.parametrize("seed", range(3100, 3110))
def test_reservoir_gives_the_same(seed: int) -> None:
    problem = small_problem(seed, 6)
    budget = budget_between(problem, 0.5)
    by_copies = run_solver(Moccasin(), problem, budget, time_limit_s=60)
    by_reservoir = run_solver(Moccasin(precedence="reservoir"), problem, budget, time_limit_s=60)
    assert by_copies.status is by_reservoir.status
    assert by_copies.bound == by_reservoir.bound


@pytest.mark.parametrize("seed", range(3200, 3210))
def test_three_runs(seed: int) -> None:
    problem = small_problem(seed, 6)
    budget = budget_between(problem, 0.2)
    solution = run_solver(Moccasin(max_runs=3), problem, budget, time_limit_s=60)

    def fits(schedule: Schedule) -> bool:
        trace = simulate(problem, schedule)
        return trace.peak <= budget and max(trace.runs) <= 3

    assert_equals(problem, solution, cheapest_by_force(problem, fits))


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(3300, 3320))
def test_any_order(seed: int, part: float) -> None:
    problem = small_problem(seed, 4)
    budget = budget_between(problem, part)
    solution = run_solver(Moccasin(keep_order=False), problem, budget, time_limit_s=60)
    assert_equals(problem, solution, cheapest_sequence(problem, budget, max_runs=2))


def assert_equals(problem: Problem, solution: Solution, best: int | None) -> None:
    if best is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.message.startswith("proven")
    else:
        assert solution.status is Status.OPTIMAL
        assert solution.schedule is not None
        assert simulate(problem, solution.schedule).cost == best == solution.bound
