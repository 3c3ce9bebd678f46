"""twremat on the published instances: its known figures, and a clear no where it fails."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clocks import JumpingClock

from rekindle import _native
from rekindle.core import Status, keep_all, read_problem, simulate
from rekindle.solve import run_solver
from rekindle.solve.twremat import TWRemat

INSTANCES = Path(__file__).parents[2] / "instances"
# Three sequences, three ways to value a kept value: all the work that one solve may do.
MOST_FILL_UPS = 3 * 3 * TWRemat().num_limits


@contextlib.contextmanager
def counted_fill_ups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of the sequences that are filled up meanwhile."""
    lengths: list[int] = []
    fill_up = _native.fill_up

    def counted(problem, sequence, *rest):
        lengths.append(len(sequence))
        return fill_up(problem, sequence, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(_native, "fill_up", counted)
        yield lengths


@pytest.mark.parametrize(
    ("name", "share", "at_most"),
    [
        ("CM2", 0.9, 0.0011),
        ("CM2", 0.8, 0.0031),
        ("CM2", 0.7, 0.0058),
        ("CM2", 0.5, 0.016),
        ("CM2", 0.3, 0.05),
        ("CM2", 0.2, 0.09),
        ("CM1", 0.9, 0.0014),
        ("CM1", 0.8, 0.0020),
        ("CM1", 0.7, 0.0305),
    ],
)
def test_overheads_on_checkmate_graphs(name, share, at_most, monkeypatch):
    problem = read_problem(INSTANCES / f"{name}.json")
    plain = simulate(problem, keep_all(problem))
    with counted_fill_ups(monkeypatch) as lengths:
        solution = run_solver(TWRemat(), problem, int(plain.peak * share))
    assert 0 < len(lengths) <= MOST_FILL_UPS
    assert max(lengths) <= TWRemat().max_length
    trace = simulate(problem, solution.schedule)
    assert trace.peak <= plain.peak * share
    assert trace.cost <= plain.cost * (1 + at_most)


def test_a_graph_without_small_separators_ends_quickly_with_a_reason(monkeypatch):
    problem = read_problem(INSTANCES / "RL4.json")
    plain = simulate(problem, keep_all(problem))
    with counted_fill_ups(monkeypatch) as lengths:
        solution = run_solver(TWRemat(), problem, int(plain.peak * 0.7))
    assert 0 < len(lengths) <= MOST_FILL_UPS
    assert max(lengths) <= TWRemat().max_length
    assert solution.status is Status.TIME_LIMIT
    assert "width" in solution.message
    assert simulate(problem, solution.smallest).peak < plain.peak


@pytest.mark.parametrize("jump_at", [5, 30])
def test_the_time_limit_is_kept(jump_at, monkeypatch):
    problem = read_problem(INSTANCES / "RL4.json")
    budget = int(simulate(problem, keep_all(problem)).peak * 0.8)
    with JumpingClock(monkeypatch, 10.0, jump_at) as clock:
        solution = run_solver(TWRemat(), problem, budget, time_limit_s=10.0)
    clock.assert_kept(len(problem.ops))
    assert solution.stopped_by == "time limit"


def test_a_budget_that_needs_nothing_is_answered_with_keep_all():
    problem = read_problem(INSTANCES / "CM1.json")
    plain = simulate(problem, keep_all(problem))
    solution = run_solver(TWRemat(), problem, plain.peak)
    assert solution.status is Status.OPTIMAL
    assert solution.schedule == keep_all(problem)
