"""Less memory never costs less, in calls that know nothing of each other."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_graphs import training_graph

from rekindle.core import Problem, keep_all, simulate
from rekindle.core.generate import random_problem
from rekindle.core.solution import Status
from rekindle.solve.auto.auto import Auto
from rekindle.solve.base import run_solver, without_dead_ops
from rekindle.solve.pareto import Ladder

SHARES = (0.4, 0.5, 0.6, 0.7, 0.71, 0.8, 0.9, 1.0)


def costs(solver: Auto | Ladder, problem: Problem, seed: int = 0) -> list[int]:
    """Of the budgets that are met, from the smallest up; once met, a budget stays met."""
    problem, _ = without_dead_ops(problem)
    base = simulate(problem, keep_all(problem))
    found: list[int] = []
    for share in SHARES:
        budget = int(share * base.peak)
        solution = run_solver(solver, problem, budget, time_limit_s=120.0, seed=seed)
        assert solution.stopped_by not in ("time limit", "interrupt")
        if solution.schedule is None:
            assert not found
            assert solution.status in (Status.INFEASIBLE, Status.TIME_LIMIT)
            continue
        trace = simulate(problem, solution.schedule)
        assert trace.peak <= budget
        assert trace.cost >= (solution.bound or 0)
        found.append(trace.cost)
    assert found[-1] == base.cost
    return found


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.integers(3, 16))
def test_the_ladder_on_training_graphs(seed: int, num_layers: int) -> None:
    solver = Ladder(Auto(max_rounds=2, effort=0.02, threads=1), rungs=6)
    falling = costs(solver, training_graph(seed, num_layers, extras=False), seed % 3)
    assert all(more >= less for more, less in itertools.pairwise(falling))


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.integers(4, 24))
def test_the_ladder_on_any_graphs(seed: int, num_ops: int) -> None:
    solver = Ladder(Auto(max_rounds=2, effort=0.02, threads=1), rungs=6)
    falling = costs(solver, random_problem(seed, num_ops=num_ops), seed % 3)
    assert all(more >= less for more, less in itertools.pairwise(falling))


QUICK = Auto(max_rounds=7, effort=0.05, threads=1)


def wrong_way_round(problem: Problem, seed: int, *, proven_only: bool) -> tuple[int, int]:
    """Of `auto` alone: answers dearer than one for less memory (none at all is the dearest), and
    answers. `proven_only`: among those that are proven optimal, or proven not to be."""
    problem, _ = without_dead_ops(problem)
    base = simulate(problem, keep_all(problem))
    least = math.inf
    wrong = answers = 0
    for share in SHARES:
        budget = int(share * base.peak)
        solution = run_solver(QUICK, problem, budget, time_limit_s=120.0, seed=seed)
        assert solution.stopped_by not in ("time limit", "interrupt")
        cost = math.inf
        if solution.schedule is not None:
            trace = simulate(problem, solution.schedule)
            assert trace.peak <= budget
            assert trace.cost >= (solution.bound or 0)
            cost = trace.cost
        proven = solution.status is Status.OPTIMAL or solution.message.startswith("proven")
        if proven_only and not proven:
            continue
        answers += 1
        wrong += cost > least
        least = min(least, cost)
    return wrong, answers


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_what_auto_proves_of_training_graphs(seed: int, num_layers: int) -> None:
    wrong, answers = wrong_way_round(training_graph(seed, num_layers), seed % 3, proven_only=True)
    assert wrong == 0
    assert answers  # keep-all at least


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(4, 16))
def test_what_auto_proves_of_any_graphs(seed: int, num_ops: int) -> None:
    problem = random_problem(seed, num_ops=num_ops)
    wrong, answers = wrong_way_round(problem, seed % 3, proven_only=True)
    assert wrong == 0
    assert answers


@pytest.mark.slow
def test_auto_alone_is_seldom_the_wrong_way_round() -> None:
    """With a twentieth of its default effort, so that most of what it finds is luck."""
    wrong = answers = 0
    for seed in range(100):
        if seed % 2:
            problem = training_graph(seed, 2 + seed % 9)
        else:
            problem = random_problem(seed, num_ops=6 + seed % 25)
        mine, asked = wrong_way_round(problem, 0, proven_only=False)
        wrong, answers = wrong + mine, answers + asked
    assert wrong <= 0.01 * answers


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_auto_alone_on_random_problems(seed: int) -> None:
    problem = (
        training_graph(seed, 4 + seed) if seed % 2 else random_problem(seed, num_ops=10 + seed)
    )
    falling = costs(Auto(), problem)
    assert all(more >= less for more, less in itertools.pairwise(falling))
