"""The native account of schedules with transfers against the reference, bit for bit."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference_simulator
from support import reference_transfers as reference
from support.random_transfers import (
    changed_steps,
    random_link,
    random_transfer_problem,
    random_transfer_schedule,
)

from rekindle.core import Problem, Schedule, check_problem, copies, schedule_of, simulate
from rekindle.core.generate import random_problem, random_schedule
from rekindle.errors import InvalidSchedule


def assert_same(problem: Problem, schedule: Schedule) -> None:
    ours, theirs = simulate(problem, schedule), reference.simulate(problem, schedule)
    for field in ("memory", "peak", "peak_step", "cost", "runs", "host_peak"):
        assert getattr(ours, field) == getattr(theirs, field), field
    if schedule.transfers:
        lanes = ours.lanes
        assert ours.host_memory == theirs.host_memory
        assert lanes.finish == theirs.finish
        assert (lanes.compute, lanes.to_host, lanes.from_host) == theirs.ends
        assert all(start <= end for start, end in zip(lanes.start, lanes.finish, strict=True))


def accepted(problem: Problem, schedule: Schedule) -> bool:
    """Whether the reference accepts it; then both give the same numbers, else both refuse it."""
    try:
        reference.simulate(problem, schedule)
    except reference.Invalid:
        with pytest.raises(InvalidSchedule):
            simulate(problem, schedule)
        return False
    assert_same(problem, schedule)
    return True


def case(seed: int) -> str:
    rng = Random(seed)
    problem = random_transfer_problem(rng, rng.randint(1, 12))
    check_problem(problem)
    schedule = random_transfer_schedule(problem, rng, rate=0.75 * rng.random())
    if rng.random() < 0.4:
        schedule = changed_steps(problem, schedule, rng)
        return "changed valid" if accepted(problem, schedule) else "changed invalid"
    if problem.transfers.host_budget is None:
        assert_same(problem, schedule)  # valid as it is made
        return "valid"
    return "within the host" if accepted(problem, schedule) else "beyond the host"


def test_random_schedules():
    found = Counter(case(seed) for seed in range(600))
    # Each way must be walked: a generator that makes one kind alone would test little.
    assert len(found) == 5
    assert min(found.values()) >= 10


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_random_schedules():
    assert min(Counter(case(seed) for seed in range(1000, 11_000)).values()) >= 100


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 4), st.data())
def test_any_sequence(seed, num_ops, data):
    problem = random_transfer_problem(Random(seed), num_ops)
    kinds = st.sampled_from(("send", "drop", "fetch", "release"))
    step = st.integers(0, num_ops) | st.tuples(kinds, st.integers(0, len(problem.values)))
    accepted(problem, schedule_of(data.draw(st.lists(step, max_size=3 * num_ops))))


def test_without_transfers_nothing_changes():
    """The same numbers with a link and without, and those of the first reference."""
    for seed in range(300):
        rng = Random(seed)
        problem = random_problem(rng, rng.randint(1, 12), inplace=rng.random())
        schedule = random_schedule(problem, rng, repeats=0.5)
        linked = replace(problem, transfers=random_link(rng, 100))
        assert simulate(linked, schedule) == simulate(problem, schedule)
        expected = reference_simulator.simulate(problem, schedule)
        assert reference.simulate(linked, schedule).memory == expected.memory
        assert reference.simulate(linked, schedule).cost == expected.cost


def test_copies_add_up_to_the_memory():
    for seed in range(100):
        rng = Random(seed)
        problem = replace(random_transfer_problem(rng, 8))
        problem = replace(problem, transfers=replace(problem.transfers, host_budget=None))
        schedule = random_transfer_schedule(problem, rng)
        trace, alive = simulate(problem, schedule), copies(problem, schedule)
        for t, step in enumerate(schedule.steps):
            if isinstance(step, tuple):
                there = [c.value_id for c in alive if c.first <= t <= c.last]
                assert trace.memory[t] == sum(problem.values[v].size for v in there)
