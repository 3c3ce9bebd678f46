"""Problems with pinned values: the native simulator against the reference, files, and solvers."""

from dataclasses import replace
from random import Random

import pytest
from support import reference_simulator as reference

from rekindle.core import Problem, Schedule, check_problem, keep_all, problem_hash, simulate
from rekindle.core.files import problem_from_record, problem_record
from rekindle.core.generate import random_problem, random_schedule
from rekindle.solve import SOLVERS, run_solver
from rekindle.solve.base import unavailable, without_dead_ops


def drawn(seed: int) -> tuple[Problem, Schedule]:
    rng = Random(seed)
    problem = random_problem(
        rng, rng.randint(2, 16), inplace=rng.random(), loss=rng.random(), pinned=rng.random()
    )
    return problem, random_schedule(problem, rng, repeats=0.6 * rng.random())


def assert_same(seeds: range) -> None:
    num_pinned = num_matter = 0
    for seed in seeds:
        problem, schedule = drawn(seed)
        check_problem(problem)
        ours, theirs = simulate(problem, schedule), reference.simulate(problem, schedule)
        for field in ("memory", "peak", "peak_step", "cost", "runs"):
            assert getattr(ours, field) == getattr(theirs, field), (seed, field)
        num_pinned += bool(problem.pinned)
        num_matter += ours.memory != simulate(replace(problem, pinned=()), schedule).memory
    assert num_pinned > len(seeds) // 2
    assert num_matter > len(seeds) // 10  # else the comparison would say little


def test_many_seeds():
    assert_same(range(1500))


@pytest.mark.slow
def test_ten_thousand():
    assert_same(range(1500, 12_000))


def test_files():
    for seed in range(100):
        problem, _ = drawn(seed)
        assert problem_from_record(problem_record(problem)) == problem
        without = replace(problem, pinned=())
        assert (problem_hash(without) != problem_hash(problem)) == bool(problem.pinned)


def test_dead_ops_take_no_pins_away():
    for seed in range(200):
        problem, schedule = drawn(seed)
        small, kept = without_dead_ops(problem)
        check_problem(small)
        assert len(small.pinned) == len(problem.pinned)
        new = {old: i for i, old in enumerate(kept)}
        shorter = Schedule(tuple(i for i in schedule.ops if i in new))
        again = Schedule(tuple(new[i] for i in shorter.ops))
        assert simulate(small, again).memory == reference.simulate(problem, shorter).memory


@pytest.mark.parametrize("solver", [s for s in SOLVERS if not unavailable(s)], ids=lambda s: s.name)
def test_solvers_keep_the_budget(solver):
    """What a solver finds within a budget is within it with the pins, and bounds are bounds."""
    num_found = 0
    for seed in range(6):
        problem = random_problem(Random(seed), 8, loss=1.0, once=0.0, pinned=0.3)
        if not problem.pinned or solver.accepts(without_dead_ops(problem)[0]) is not None:
            continue
        whole = simulate(problem, keep_all(problem))
        solution = run_solver(solver, problem, whole.peak, time_limit_s=0.2)
        if solution.schedule is None:
            continue
        num_found += 1
        trace = simulate(problem, solution.schedule)
        assert trace.peak <= whole.peak
        assert solution.bound is None or solution.bound <= trace.cost <= whole.cost
    if solver.name in ("auto", "fastsa", "keep-all"):
        assert num_found > 0
