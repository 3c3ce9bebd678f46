"""Dropping needless runs: valid, within the limit, never dearer, and nothing left to drop."""

from random import Random

import pytest

from rekindle import _native
from rekindle.core import Schedule, generate, simulate


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules(seed):
    rng = Random(seed)
    problem = generate.random_problem(rng, rng.randint(2, 12))
    schedule = generate.random_schedule(problem, rng, repeats=0.5)
    before = simulate(problem, schedule)
    limit = before.peak + rng.choice((0, 5, 50))
    ops = _native.drop_needless_runs(problem.native, list(schedule.ops), limit, 10.0)
    after = simulate(problem, Schedule(tuple(ops)))
    assert after.peak <= limit
    assert after.cost <= before.cost
    for step in range(len(ops)):
        if ops.count(ops[step]) == 1:
            continue
        fewer = Schedule(tuple(ops[:step] + ops[step + 1 :]))
        try:
            shorter = simulate(problem, fewer)
        except ValueError:
            continue  # the first run of a value that is read before the second
        assert shorter.peak > limit


def test_a_schedule_above_the_limit_is_left_as_it_is():
    problem = generate.chain(6, 0)
    ops = list(range(len(problem.ops)))
    assert _native.drop_needless_runs(problem.native, [0, *ops], 1, 10.0) == ops


def test_with_enough_memory_every_op_runs_once():
    problem = generate.transformer(2)
    schedule = generate.random_schedule(problem, 3, repeats=0.4, reorder=False)
    ops = _native.drop_needless_runs(problem.native, list(schedule.ops), 10**12, 30.0)
    assert sorted(ops) == list(range(len(problem.ops)))
