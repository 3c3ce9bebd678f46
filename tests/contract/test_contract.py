"""What every solver must keep, whatever its method.

Each solver of the registry, on small problems whose optima over all schedules are known by brute
force, and on a few larger ones for the limits. A solver that needs a library which is not
installed fails here: the tests run with all of them.
"""

import re
from dataclasses import dataclass
from functools import cache

import pytest
from support import brute_force
from support.clocks import JumpingClock

from rekindle.core import (
    Problem,
    Status,
    check_problem,
    check_schedule,
    keep_all,
    problem_hash,
    read_problem,
    simulate,
)
from rekindle.core.generate import chain, random_problem, transformer
from rekindle.errors import SolverRefused
from rekindle.solve import SOLVERS, find_solver, run_solver
from rekindle.solve.base import Solver, unavailable, without_dead_ops

SMALL = {
    "chain": lambda: chain(3, 1),
    "uniform chain": lambda: chain(3, uniform=True),
    **{
        f"plain {seed}": lambda seed=seed: random_problem(
            seed, 7, inplace=0.0, once=0.0, loss=0.0, dead=0.0, multi_output=0.0, workspace=0.0
        )
        for seed in range(3)
    },
    **{f"random {seed}": lambda seed=seed: random_problem(seed, 6) for seed in range(8)},
}
TIME_LIMIT_S = 3.0  # small problems: a solver is done long before


@dataclass(frozen=True)
class Case:
    problem: Problem
    smallest_peak: int
    keep_all_peak: int
    optima: dict[int, int]  # budget -> smallest cost of all schedules


@cache
def case(name: str) -> Case:
    problem = SMALL[name]()
    check_problem(problem)
    smallest = brute_force.smallest_peak(problem).peak
    largest = simulate(problem, keep_all(problem)).peak
    budgets = sorted({smallest, (smallest + largest) // 2, largest})
    optima = {}
    for budget in budgets:
        best = brute_force.cheapest(problem, budget)
        assert best is not None
        optima[budget] = best.cost
    return Case(problem, smallest, largest, optima)


def refused(solver: Solver, problem: Problem) -> bool:
    """Whether the method is not for this problem; then it must say so and not try."""
    assert unavailable(solver) is None
    reason = solver.accepts(without_dead_ops(problem)[0])
    if reason is None:
        return False
    with pytest.raises(SolverRefused, match=re.escape(reason)):
        run_solver(solver, problem, simulate(problem, keep_all(problem)).peak)
    return True


every_solver = pytest.mark.parametrize("name", [solver.name for solver in SOLVERS])
every_case = pytest.mark.parametrize("case_name", SMALL)


@every_solver
@every_case
def test_against_brute_force(name, case_name):
    solver, known = find_solver(name), case(case_name)
    if refused(solver, known.problem):
        return
    for budget, optimum in known.optima.items():
        solution = run_solver(solver, known.problem, budget, time_limit_s=TIME_LIMIT_S)
        assert solution.status is not Status.ERROR
        assert solution.solver
        if solution.schedule is None:
            # The budget can be met, so a proof can only be one over the solver's own space; there
            # must be a number.
            own_space = solution.message.startswith("proven over")
            assert solution.status is (Status.INFEASIBLE if own_space else Status.TIME_LIMIT)
            assert solution.smallest is not None
            check_schedule(known.problem, solution.smallest)
            assert simulate(known.problem, solution.smallest).peak > budget
            continue
        check_schedule(known.problem, solution.schedule)
        trace = simulate(known.problem, solution.schedule)
        assert trace.peak <= budget
        assert trace.cost >= optimum
        if solution.bound is not None:
            assert solution.bound <= trace.cost
            # A bound over the solver's own space (an exact method in a fixed order) may lie above
            # the optimum of all schedules; then the notes must say what the space is.
            assert solution.bound <= optimum or (solver.exact and solution.notes)
        if solution.status is Status.OPTIMAL and trace.cost > optimum:
            assert solver.exact
            assert solution.notes, "optimal in its own space only: say so in the notes"


@every_solver
@every_case
def test_keep_all_budget_is_always_met(name, case_name):
    """At the keep-all peak nothing has to run twice, and every method can see that."""
    solver, known = find_solver(name), case(case_name)
    if refused(solver, known.problem):
        return
    solution = run_solver(solver, known.problem, known.keep_all_peak, time_limit_s=TIME_LIMIT_S)
    assert solution.schedule is not None
    small, _ = without_dead_ops(known.problem)
    assert simulate(known.problem, solution.schedule).cost <= sum(op.cost for op in small.ops)


@every_solver
@every_case
def test_below_the_smallest_peak(name, case_name):
    solver, known = find_solver(name), case(case_name)
    if refused(solver, known.problem):
        return
    if known.smallest_peak == 0:
        return  # nothing lies below
    # A search without a proof takes all of its time here.
    solution = run_solver(solver, known.problem, known.smallest_peak - 1, time_limit_s=0.5)
    assert solution.schedule is None
    proven = solution.message.startswith("proven")
    assert solution.status is (Status.INFEASIBLE if proven else Status.TIME_LIMIT)
    assert solution.message
    if solution.smallest is not None:
        check_schedule(known.problem, solution.smallest)
        assert simulate(known.problem, solution.smallest).peak >= known.smallest_peak


@every_solver
@pytest.mark.parametrize("case_name", ["chain", "random 1", "random 4"])
def test_same_seed_same_schedule(name, case_name):
    solver, known = find_solver(name), case(case_name)
    if refused(solver, known.problem):
        return
    budget = sorted(known.optima)[len(known.optima) // 2]
    first, second = (
        run_solver(solver, known.problem, budget, time_limit_s=30.0, seed=7) for _ in range(2)
    )
    if "time limit" not in (first.stopped_by, second.stopped_by):
        assert first.schedule == second.schedule
    assert first.seed == second.seed == 7


@every_solver
def test_the_problem_is_left_alone(name):
    solver, known = find_solver(name), case("random 2")
    if refused(solver, known.problem):
        return
    before = problem_hash(known.problem)
    run_solver(solver, known.problem, known.keep_all_peak, time_limit_s=TIME_LIMIT_S)
    assert problem_hash(known.problem) == before


every_size = pytest.mark.parametrize("size", ["RL2", "transformer"])


@every_solver
@pytest.mark.parametrize(("limit_s", "jump_at"), [(0.2, 5), (1.0, 40)])
@every_size
def test_time_limit(name, limit_s, jump_at, size, instances, monkeypatch):
    """Kept on problems that are too large for it, wherever in the search the time is up."""
    solver = find_solver(name)
    problem = read_problem(instances / "RL2.json") if size == "RL2" else transformer(8)
    if refused(solver, problem):
        return
    budget = simulate(problem, keep_all(problem)).peak * 7 // 10
    with JumpingClock(monkeypatch, limit_s, jump_at) as clock:
        solution = run_solver(solver, problem, budget, time_limit_s=limit_s)
    clock.assert_kept(len(problem.ops))
    if solution.schedule is not None:
        assert simulate(problem, solution.schedule).peak <= budget


@pytest.mark.slow
@every_solver
@every_size
def test_time_limit_on_the_wall(name, size, instances):
    """Within 10 % and a second, or a third of the limit."""
    solver, limit_s = find_solver(name), 3.0
    problem = read_problem(instances / "RL2.json") if size == "RL2" else transformer(8)
    if refused(solver, problem):
        return
    budget = simulate(problem, keep_all(problem)).peak * 7 // 10
    solution = run_solver(solver, problem, budget, time_limit_s=limit_s)
    assert solution.wall_s / limit_s <= 1.1 + 1 / 3


@every_solver
def test_warm_start_is_not_made_worse(name):
    """A solver may leave a warm start unused; it may not return something invalid from it."""
    solver, known = find_solver(name), case("random 5")
    if refused(solver, known.problem):
        return
    budget = known.smallest_peak
    best = brute_force.cheapest(known.problem, budget)
    assert best is not None
    solution = run_solver(
        solver, known.problem, budget, time_limit_s=TIME_LIMIT_S, warm_start=best.schedule
    )
    if solution.schedule is not None:
        assert simulate(known.problem, solution.schedule).peak <= budget


@every_solver
def test_a_warm_start_above_the_budget(name):
    """What was made for more memory is no answer, and no reason to fail."""
    solver, problem = find_solver(name), chain(6)
    if refused(solver, problem):
        return
    plain = keep_all(problem)
    budget = int(0.7 * simulate(problem, plain).peak)
    solution = run_solver(solver, problem, budget, time_limit_s=TIME_LIMIT_S, warm_start=plain)
    if solution.schedule is not None:
        assert simulate(problem, solution.schedule).peak <= budget
