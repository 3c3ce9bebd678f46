"""The search of benchmarks/gpu/bigger.py: the largest size that fits, in few tries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.benchmark_scripts import load_script

search = load_script("gpu/largest.py")


def true_largest(needed, limit: float, grain: int) -> int:
    size = 0
    while needed(size + grain) <= limit:
        size += grain
    return size


def run(needed, limit, *, grain=1, power=1, probes=(2, 4), tells=True, **options):
    """The search as the benchmark uses it: probes, and each success tells what it needed."""
    points = [(size * grain, needed(size * grain)) for size in probes]
    tried = []

    def fits(size: int) -> bool:
        assert size > 0
        assert size % grain == 0
        assert size not in tried
        tried.append(size)
        if needed(size) > limit:
            return False
        if tells:
            points.append((size, needed(size)))
        return True

    found = search.largest(
        fits, lambda: search.predicted(points, limit, grain, power=power), grain=grain, **options
    )
    assert found.num_tries == len(tried)
    return found


def test_a_line_takes_two_tries() -> None:
    found = run(lambda n: 10 + 3 * n, 400, tolerance=0)
    assert (found.size, found.fails, found.num_tries, found.closed) == (130, 131, 2, True)


def test_a_side_whose_square_is_the_line() -> None:
    found = run(lambda n: 5 + n * n / 1000, 1500, grain=32, power=2, tolerance=0)
    assert found.size == 1216
    assert found.num_tries == 2


def test_a_steeper_line_that_the_probes_did_not_see() -> None:
    def needed(n):
        return max(50 + n, 3 * n)

    found = run(needed, 600, tolerance=0, max_tries=30)
    assert (found.size, found.closed) == (200, True)
    found = run(needed, 600, known=4)
    assert found.closed
    assert 196 <= found.size <= 200
    assert found.num_tries <= 8


def test_what_is_known_to_fit_is_not_tried_again() -> None:
    found = run(lambda n: n, 100, known=100, tells=False, probes=(1, 2))
    assert (found.size, found.fails, found.num_tries) == (100, 102, 1)


def test_a_far_point_beats_a_near_one_that_is_not_exact() -> None:
    points = [(20, 20.0), (100, 101.0), (101, 100.0)]
    assert search.predicted(points, 110, 1, exact=False) == 111
    assert search.predicted(points, 110, 1) is None


def test_nothing_fits() -> None:
    found = run(lambda n: 100 + n, 90, max_tries=20)
    assert (found.size, found.fails, found.closed) == (0, 1, True)


def test_tries_that_are_used_up_leave_the_answer_open() -> None:
    found = run(lambda n: n**0.5, 1000, max_tries=2)
    assert not found.closed
    assert found.size > 0


def test_time_that_is_used_up_leaves_the_answer_open() -> None:
    turns = iter([True, True, False])
    found = run(lambda n: n**0.5, 1000, known=7, may_go_on=lambda: next(turns))
    assert (found.num_tries, found.closed) == (2, False)
    assert found.size > 7


@pytest.mark.parametrize("points", [[], [(4, 10.0)], [(4, 10.0), (8, 10.0)]])
def test_no_line_no_prediction(points) -> None:
    assert search.predicted(points, 100, 1) is None


@given(
    base=st.floats(0, 100), slope=st.floats(0.01, 5), bend=st.floats(0, 0.02),
    limit=st.floats(1, 500), grain=st.sampled_from([1, 4, 32]), tells=st.booleans(),
    tolerance=st.sampled_from([0.0, 0.02, 0.1]),
)  # fmt: skip
def test_finds_the_largest(base, slope, bend, limit, grain, tells, tolerance) -> None:
    def needed(n):
        return base + slope * n / grain + bend * (n / grain) ** 2

    expected = true_largest(needed, limit, grain)
    found = run(needed, limit, grain=grain, tells=tells, tolerance=tolerance, max_tries=200)
    assert found.closed
    assert found.size <= expected < found.fails
    assert found.fails - found.size <= max(grain, tolerance * found.size)
    if bend == 0 and tells and expected > 4 * grain:
        assert found.num_tries <= 4  # as rounding makes of two
