"""twremat on the published instances: its known figures, and a clear no where it fails."""

import time
from pathlib import Path

import pytest

from rekindle.core import Status, keep_all, read_problem, simulate
from rekindle.solve import run_solver
from rekindle.solve.twremat import TWRemat

INSTANCES = Path(__file__).parents[2] / "instances"


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
def test_overheads_on_checkmate_graphs(name, share, at_most):
    problem = read_problem(INSTANCES / f"{name}.json")
    plain = simulate(problem, keep_all(problem))
    start = time.process_time()
    solution = run_solver(TWRemat(), problem, int(plain.peak * share))
    assert time.process_time() - start < 2
    trace = simulate(problem, solution.schedule)
    assert trace.peak <= plain.peak * share
    assert trace.cost <= plain.cost * (1 + at_most)


def test_a_graph_without_small_separators_ends_quickly_with_a_reason():
    problem = read_problem(INSTANCES / "RL4.json")
    plain = simulate(problem, keep_all(problem))
    start = time.process_time()
    solution = run_solver(TWRemat(), problem, int(plain.peak * 0.7))
    assert time.process_time() - start < 10
    assert solution.status is Status.INFEASIBLE
    assert "width" in solution.message
    assert simulate(problem, solution.smallest).peak < plain.peak


def test_the_time_limit_is_kept():
    problem = read_problem(INSTANCES / "RL4.json")
    budget = int(simulate(problem, keep_all(problem)).peak * 0.8)
    start = time.monotonic()
    solution = run_solver(TWRemat(), problem, budget, time_limit_s=0.1)
    assert time.monotonic() - start < 1.1
    assert solution.stopped_by == "time limit"


def test_a_budget_that_needs_nothing_is_answered_with_keep_all():
    problem = read_problem(INSTANCES / "CM1.json")
    plain = simulate(problem, keep_all(problem))
    solution = run_solver(TWRemat(), problem, plain.peak)
    assert solution.status is Status.OPTIMAL
    assert solution.schedule == keep_all(problem)
