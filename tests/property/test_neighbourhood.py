"""A part of a schedule as a problem of its own means the same as in the whole."""

import random

import pytest

from rekindle.core import Problem, Schedule, check_problem, check_schedule, simulate
from rekindle.core.generate import random_problem, random_schedule, transformer
from rekindle.solve.base import without_dead_ops
from rekindle.solve.staged.free_ops import choose_free
from rekindle.solve.staged.neighbourhood import neighbourhood, without_multiple_sources

NO_BUDGET = 2**60


def case(seed: int) -> tuple[Problem, Schedule, random.Random]:
    rng = random.Random(seed)
    random_one = random_problem(seed, rng.randint(4, 14), inplace=0.5)
    problem, _ = without_dead_ops(random_one if seed % 4 else transformer(1 + seed % 3))
    return problem, random_schedule(problem, seed), rng


@pytest.mark.parametrize("seed", range(150))
def test_same_cost_and_peak_as_in_the_whole(seed):
    problem, schedule, rng = case(seed)
    free = {i for i in range(len(problem.ops)) if rng.random() < 0.5}
    part = neighbourhood(problem, schedule, free, NO_BUDGET)
    if part is None:
        assert not without_multiple_sources(problem, schedule.ops, free)
        return
    check_problem(part.problem)
    assert part.schedule(part.start).ops == schedule.ops
    # Others of the part that keep its order: they are schedules of the whole.
    for other in (part.start, *(random_schedule(part.problem, k, reorder=False) for k in range(3))):
        check_schedule(part.problem, other)
        whole = part.schedule(other)
        check_schedule(problem, whole)
        here, there = simulate(part.problem, other), simulate(problem, whole)
        assert here.cost == there.cost
        # Equal but for what lives to the end and could be overwritten.
        assert here.peak >= there.peak


def test_peaks_are_mostly_equal():
    equal = seen = 0
    for seed in range(150):
        problem, schedule, rng = case(seed)
        free = {i for i in range(len(problem.ops)) if rng.random() < 0.5}
        part = neighbourhood(problem, schedule, free, NO_BUDGET)
        if part is not None:
            seen += 1
            equal += simulate(part.problem, part.start).peak == simulate(problem, schedule).peak
    assert equal >= 0.95 * seen > 100


@pytest.mark.parametrize("seed", range(40))
def test_what_is_free_has_one_source_or_free_ones(seed):
    problem, schedule, rng = case(seed)
    found = choose_free(problem, schedule.ops, 8, rng)
    runs = simulate(problem, schedule).runs
    assert bool(found) == (max(runs) > 1)
    free = without_multiple_sources(problem, schedule.ops, found)
    for i in free:
        assert not problem.ops[i].once
        for v in problem.ops[i].inputs:
            by = problem.producer[v]
            assert by < 0 or by in free or runs[by] == 1


def test_a_schedule_above_the_budget_has_no_neighbourhood():
    problem, schedule, _ = case(3)
    peak = simulate(problem, schedule).peak
    free = range(len(problem.ops))
    assert neighbourhood(problem, schedule, free, peak) is not None
    assert neighbourhood(problem, schedule, free, peak - 1) is None
