"""The brute force of the tests is itself tested: against all sequences of tiny problems."""

from itertools import product
from random import Random

import pytest
from support import brute_force
from support import reference_simulator as reference

from rekindle.core import Schedule, check_schedule, simulate
from rekindle.core.generate import random_problem


def all_valid(problem, longest):
    for length in range(longest + 1):
        for steps in product(range(len(problem.ops)), repeat=length):
            try:
                yield reference.simulate(problem, Schedule(steps))
            except reference.Invalid:
                continue


@pytest.mark.parametrize("seed", range(60))
def test_equals_enumeration(seed):
    """All sequences up to a length: the optimum of the search is at least as good, and equal to
    the best of them wherever it is as short."""
    rng = Random(seed)
    problem = random_problem(rng, 4 if seed % 4 == 0 else 3, inplace=0.5, loss=0.7, once=0.1)
    longest = 6
    traces = [(t.peak, t.cost) for t in all_valid(problem, longest)]
    smallest = brute_force.smallest_peak(problem)
    assert smallest.peak <= min(traces)[0]
    if len(smallest.schedule) <= longest:
        assert smallest.peak == min(traces)[0]
    for budget in sorted({peak for peak, _ in traces} | {smallest.peak}):
        best = brute_force.cheapest(problem, budget)
        listed = min((cost for peak, cost in traces if peak <= budget), default=None)
        assert best is not None
        assert listed is None or best.cost <= listed
        if len(best.schedule) <= longest:
            assert best.cost == listed
    assert brute_force.cheapest(problem, smallest.peak - 1) is None


@pytest.mark.parametrize("seed", range(150))
def test_found_schedules_are_what_they_claim(seed):
    problem = random_problem(seed, 6, inplace=0.4)
    smallest = brute_force.smallest_peak(problem)
    best = brute_force.cheapest(problem, smallest.peak)
    assert best is not None
    for found in (smallest, best):
        check_schedule(problem, found.schedule)
        trace = simulate(problem, found.schedule)
        assert trace.cost == found.cost
        assert trace.peak <= found.peak == smallest.peak
