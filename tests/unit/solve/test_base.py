from dataclasses import dataclass, replace
from random import Random

import pytest
from support import brute_force

from rekindle.core import (
    Op,
    Problem,
    Schedule,
    Solution,
    Status,
    Value,
    check_problem,
    check_schedule,
    keep_all,
    simulate,
)
from rekindle.core.generate import chain, random_problem, random_schedule
from rekindle.errors import SolverRefused, SolverUnavailable
from rekindle.solve import SOLVERS, Progress, default_solver, find_solver, listen, run_solver
from rekindle.solve.base import best_solution, trivial_floor, unavailable, without_dead_ops
from rekindle.solve.progress import report


@dataclass(frozen=True, slots=True)
class Fixed:
    """Answers what it is told to."""

    solution: Solution
    name: str = "fixed"
    requires: tuple[str, ...] = ()
    exact: bool = False
    refusal: str | None = None

    def accepts(self, problem):
        return self.refusal

    def solve(self, problem, budget, *, time_limit_s, seed, warm_start=None):
        return self.solution


def feasible(*ops, bound=None):
    return Solution(Status.FEASIBLE, Schedule(ops), "", bound=bound)


CHAIN = Problem(
    values=tuple(Value(name, 4) for name in "abc"),
    ops=tuple(Op(name, 5, (k - 1,) if k else (), (k,)) for k, name in enumerate("abc")),
    outputs=(2,),
)


def test_only_what_simulation_confirms_is_believed():
    good = run_solver(Fixed(feasible(0, 1, 2)), CHAIN, 8, seed=3)
    assert (good.status, good.solver, good.seed) == (Status.FEASIBLE, "fixed", 3)
    over = run_solver(Fixed(feasible(0, 1, 2)), CHAIN, 7)
    assert (over.status, over.schedule) == (Status.TIME_LIMIT, None)
    assert over.smallest == Schedule((0, 1, 2))
    assert "peak of 8" in over.message
    broken = run_solver(Fixed(feasible(1, 0, 2)), CHAIN, 8)
    assert (broken.status, broken.schedule) == (Status.ERROR, None)
    assert "cannot be executed" in broken.message
    lost = Solution(Status.INFEASIBLE, None, "", smallest=Schedule((2,)))
    assert run_solver(Fixed(lost), CHAIN, 8).status is Status.ERROR


def test_a_bound_that_is_met_proves():
    proven = run_solver(Fixed(feasible(0, 1, 2, bound=15)), CHAIN, 8)
    assert (proven.status, proven.bound) == (Status.OPTIMAL, 15)
    assert run_solver(Fixed(feasible(0, 1, 2, bound=14)), CHAIN, 8).status is Status.FEASIBLE


def test_the_door():
    with pytest.raises(SolverUnavailable, match="needs no_such_library: pip install no_such_lib"):
        run_solver(Fixed(feasible(), requires=("no_such_library",)), CHAIN, 8)
    with pytest.raises(SolverRefused, match="'fixed' does not handle this problem: too odd"):
        run_solver(Fixed(feasible(), refusal="too odd"), CHAIN, 8)


def test_registry():
    names = [solver.name for solver in SOLVERS]
    assert len(set(names)) == len(names)
    assert {"keep-all", "sqrt", "floor"} <= set(names)
    for solver in SOLVERS:
        assert find_solver(solver.name) is solver is find_solver(solver)
    with pytest.raises(SolverUnavailable, match="no solver 'flor'; did you mean 'floor'"):
        find_solver("flor")
    with pytest.raises(SolverUnavailable, match="no solver '~~~'; there are auto, "):
        find_solver("~~~")
    assert unavailable(default_solver(CHAIN)) is None
    assert default_solver(CHAIN).accepts(CHAIN) is None


def test_progress_reaches_the_listener_of_its_context():
    heard = []
    with listen(heard.append):
        report(Progress("x", 1.0, cost=3))
    report(Progress("x", 2.0))
    assert [progress.cost for progress in heard] == [3]


def test_answer_takes_the_cheapest_then_the_smallest():
    found = best_solution(CHAIN, 8, [(0, 1, 0, 1, 2), (0, 1, 2)], solver="x", bound=15)
    assert (found.status, found.schedule) == (Status.OPTIMAL, Schedule((0, 1, 2)))
    none = best_solution(CHAIN, 7, [(0, 1, 2)], solver="x")
    assert (none.status, none.smallest) == (Status.INFEASIBLE, Schedule((0, 1, 2)))
    assert none.message.startswith("proven: ")
    assert best_solution(CHAIN, 7, [], solver="x").smallest is None


@pytest.mark.parametrize("seed", range(60))
def test_trivial_floor_is_below_every_peak(seed):
    problem, _ = without_dead_ops(random_problem(seed, 6, inplace=0.4))
    assert trivial_floor(problem) <= brute_force.smallest_peak(problem).peak


def test_dead_ops_by_hand():
    """d and e lead nowhere; the run-once op f stays, with what it reads."""
    problem = Problem(
        values=tuple(Value(name, 1) for name in "rabcdefg"),
        ops=(
            Op("a", 1, (0,), (1,)),
            Op("b", 1, (1,), (2,)),
            Op("c", 1, (1,), (3,)),
            Op("d", 1, (2,), (4,)),
            Op("e", 1, (4,), (5,)),
            Op("f", 1, (3,), (6,), recomputable=False),
            Op("g", 1, (1,), (7,), inplace=((1, 7),), grad_of=4),
        ),
        resident=(0,),
        outputs=(7,),
    )
    small, kept = without_dead_ops(problem)
    assert kept == (0, 2, 5, 6)
    assert [op.name for op in small.ops] == list("acfg")
    assert [value.name for value in small.values] == list("racfg")
    assert small.ops[3].inplace == ((1, 4),)
    assert small.ops[3].grad_of is None
    assert small.outputs == (4,)
    check_problem(small)


@pytest.mark.parametrize("seed", range(150))
def test_without_dead_ops_keeps_the_meaning(seed):
    rng = Random(seed)
    problem = random_problem(rng, 9, dead=0.6)
    small, kept = without_dead_ops(problem)
    check_problem(small)
    assert without_dead_ops(small) == (small, tuple(range(len(small.ops))))
    schedule = random_schedule(small, rng)
    back = Schedule(tuple(kept[i] for i in schedule.ops))
    check_schedule(problem, back)
    ours, theirs = simulate(small, schedule), simulate(problem, back)
    assert (ours.memory, ours.cost) == (theirs.memory, theirs.cost)


def test_a_warm_start_loses_its_dead_ops():
    problem = random_problem(4, 12, dead=1.0)
    small, _ = without_dead_ops(problem)
    assert len(small.ops) < len(problem.ops)

    @dataclass(frozen=True, slots=True)
    class Echo(Fixed):
        def solve(self, problem, budget, *, time_limit_s, seed, warm_start=None):
            check_schedule(problem, warm_start)
            return Solution(Status.FEASIBLE, warm_start, "")

    peak = simulate(problem, keep_all(problem)).peak
    solution = run_solver(Echo(feasible()), problem, peak, warm_start=keep_all(problem))
    assert solution.schedule is not None
    assert len(solution.schedule) == len(small.ops)


def test_chain_has_no_dead_ops():
    problem = chain(6)
    assert without_dead_ops(problem)[0] is problem


@pytest.mark.parametrize("name", ["auto", "fastsa", "floor"])
def test_costs_whose_sums_would_leave_64_bits(name):
    small = chain(8)
    ops = tuple(replace(op, cost=op.cost * 2**47 + 1) for op in small.ops)
    large = replace(small, ops=ops)
    check_problem(large)
    base = simulate(large, keep_all(large))
    assert base.cost > 2**60
    solution = run_solver(find_solver(name), large, int(0.8 * base.peak), time_limit_s=2)
    assert solution.schedule is not None
    cost = simulate(large, solution.schedule).cost
    assert cost < 2 * base.cost  # a sum that had wrapped around would have misled the search
    assert solution.bound is None or 0.9 * base.cost <= solution.bound <= cost
