"""What the search finds against the optimum over all schedules with transfers of tiny problems."""

from dataclasses import replace
from random import Random

import pytest
from support import brute_force, transfer_brute_force

from rekindle.core import HostLink, Problem, keep_all, simulate
from rekindle.core.generate import random_problem, random_schedule
from rekindle.solve import find_solver
from rekindle.solve.base import run_solver
from rekindle.solve.transfers import with_transfers
from rekindle.solve.transfers.bound import least_cost, transfer_bound
from rekindle.solve.transfers.fit import fit
from rekindle.solve.transfers.gaps import sequence_of

RATES = (10**9, 2 * 10**9, 4 * 10**9)


def tiny(seed: int, num_ops: int) -> tuple[Problem, int]:
    """A problem and a budget that recomputation alone can meet."""
    rng = Random(seed)
    problem = random_problem(rng, num_ops, inplace=0, loss=0, zeros=0.05, multi_output=0.1)
    link = HostLink(rng.choice(RATES), rng.choice(RATES), rng.choice((0, 2)), rng.choice((1, 6)))
    problem = replace(problem, transfers=link)
    low = brute_force.smallest_peak(problem).peak
    return problem, rng.randint(low, max(low, simulate(problem, keep_all(problem)).peak))


def gap(seed: int, num_ops: int) -> float:
    """How much dearer than the optimum, as a share of it."""
    problem, budget = tiny(seed, num_ops)
    best = transfer_brute_force.cheapest(problem, budget)
    trace = simulate(problem, best.schedule)
    assert (trace.cost, trace.peak <= budget) == (best.cost, True)
    solver = find_solver("auto")
    alone = run_solver(solver, problem, budget, time_limit_s=1)
    found = with_transfers(solver, problem, budget, alone, time_limit_s=1)
    cost = simulate(problem, found.schedule).cost
    assert found.bound <= best.cost <= cost <= simulate(problem, alone.schedule).cost
    return cost / best.cost - 1 if best.cost else 0.0


def test_tiny_problems():
    gaps = [gap(seed, 4) for seed in range(40)]
    assert sum(gaps) / len(gaps) <= 0.01


@pytest.mark.slow
def test_more_tiny_problems():
    gaps = [gap(seed, 5) for seed in range(1000, 1060)]
    assert sum(gaps) / len(gaps) <= 0.01
    assert sum(g == 0 for g in gaps) >= 54


def test_no_schedule_undercuts_the_bound():
    """Of any schedule with transfers that fits some budget, in both ways to count time. The cost
    that the bound is told is far off, so that it is looked for on both sides of the schedule's."""
    proven = moved = 0
    for seed in range(1500):
        rng = Random(seed)
        problem = random_problem(rng, rng.randint(4, 16), inplace=rng.random(), multi_output=0.05)
        rates = (10**7, 3 * 10**7, 10**8, 3 * 10**8)
        link = HostLink(rng.choice(rates), rng.choice(rates), 0, 1, serial=rng.random() < 0.5)
        problem = replace(problem, transfers=link)
        peak = simulate(problem, keep_all(problem)).peak
        ops = random_schedule(problem, rng, repeats=0.2, reorder=False).ops
        schedule = fit(sequence_of(problem, ops), int(rng.uniform(0.4, 0.9) * peak))
        if schedule is None:
            continue
        trace = simulate(problem, schedule)
        bound = transfer_bound(problem, trace.peak, 2 * trace.cost + 10, 1.0)
        assert bound <= trace.cost
        proven += bound > least_cost(problem)
        moved += bool(schedule.transfers)
    assert min(proven, moved) > 50
