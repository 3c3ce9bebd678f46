"""The native simulator against the reference, bit for bit, on everything the format allows."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference_simulator as reference

from rekindle.core import Op, Problem, Schedule, Value, check_problem, simulate
from rekindle.core.generate import random_problem, random_schedule
from rekindle.errors import InvalidSchedule

# A seed rather than st.randoms(), which is a hundred times slower; what shrinks is `num_ops`.
seeds = st.integers(0, 2**32)


def assert_same(problem: Problem, schedule: Schedule) -> None:
    ours, theirs = simulate(problem, schedule), reference.simulate(problem, schedule)
    for field in ("memory", "peak", "peak_step", "cost", "runs"):
        assert getattr(ours, field) == getattr(theirs, field), field


@settings(max_examples=1500)
@given(seeds, st.integers(1, 10), st.sampled_from([0.0, 0.3, 0.7]), st.booleans())
def test_valid_schedules(seed, num_ops, repeats, reorder):
    rng = Random(seed)
    problem = random_problem(rng, num_ops, inplace=0.4, once=0.2, loss=0.6)
    check_problem(problem)
    assert_same(problem, random_schedule(problem, rng, repeats=repeats, reorder=reorder))


def test_many_seeds():
    """Thousands more, drawn faster than hypothesis draws them, and of larger graphs."""
    for seed in range(3000):
        rng = Random(seed)
        problem = random_problem(rng, rng.randint(1, 16), inplace=rng.random(), loss=rng.random())
        assert_same(problem, random_schedule(problem, rng, repeats=0.6 * rng.random()))


@settings(max_examples=1500)
@given(seeds, st.integers(1, 6), st.data())
def test_any_sequence(seed, num_ops, data):
    """Both accept the same sequences, valid or not, and agree on the valid ones."""
    problem = random_problem(seed, num_ops, once=0.2)
    steps = data.draw(st.lists(st.integers(-1, num_ops), max_size=2 * num_ops))
    schedule = Schedule(tuple(steps))
    try:
        reference.simulate(problem, schedule)
    except reference.Invalid:
        with pytest.raises(InvalidSchedule):
            simulate(problem, schedule)
    else:
        assert_same(problem, schedule)


def test_numbers_near_the_limits():
    """Two copies of a value of nearly 2^62 bytes, and a workspace on top, do not overflow."""
    big = 2**62 - 2
    problem = Problem(
        values=(Value("x", big), Value("g", 0), Value("y", 0)),
        ops=(
            Op("f", 2**62 - 3, (), (0,), workspace=big),
            Op("loss", 0, (0,), (1,), phase="loss"),
            Op("b", 1, (0, 1), (2,), workspace=2**62 - 1),
        ),
        outputs=(2,),
        held=(0,),
    )
    check_problem(problem)
    schedule = Schedule((0, 1, 0, 2, 0, 2))
    trace = simulate(problem, schedule)
    assert_same(problem, schedule)
    assert trace.peak == 2 * big + 2**62 - 1 > 2**63
    assert trace.cost == 3 * (2**62 - 3) + 2 > 2**63
