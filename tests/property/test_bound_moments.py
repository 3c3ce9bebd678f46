"""The bound at every single moment, against the optimum; and for published instances."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brute_force
from support.training_graphs import cheapest, training_graph

from rekindle import _native
from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.core.generate import random_problem
from rekindle.solve.lower_bound import best_bound

shares = st.sampled_from([0.95, 0.8, 0.65, 0.5])


def needed_cost(problem: Problem) -> int:
    """Of the ops that some output or an op that must run depends on: they run at least once."""
    todo = [problem.producer[v] for v in problem.outputs if problem.producer[v] >= 0]
    todo += [i for i, op in enumerate(problem.ops) if op.phase == "loss" or not op.recomputable]
    needed: set[int] = set()
    while todo:
        i = todo.pop()
        if i not in needed:
            needed.add(i)
            todo += [problem.producer[v] for v in problem.ops[i].inputs if problem.producer[v] >= 0]
    return sum(problem.ops[i].cost for i in needed)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(3, 7), shares)
def test_no_moment_is_above_the_optimum(seed: int, num_ops: int, share: float) -> None:
    """Dead ops included: they have no first run."""
    problem = random_problem(seed, num_ops=num_ops, inplace=0.4, multi_output=0.3)
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    optimum = brute_force.cheapest(problem, budget)
    if optimum is None:
        return
    base = needed_cost(problem)
    for i in range(len(problem.ops)):
        extra, infeasible, _, _ = _native.bound_at(problem.native, i, budget, 10.0)
        assert not infeasible
        assert base + extra <= optimum.cost + 1e-6


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(2, 3), shares)
def test_no_moment_of_a_training_step_is_above_the_optimum(
    seed: int, num_layers: int, share: float
) -> None:
    problem = training_graph(seed, num_layers)
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    optimum = cheapest(problem, budget)
    if optimum is None:
        return
    base = needed_cost(problem)
    for i in range(len(problem.ops)):
        extra, infeasible, _, _ = _native.bound_at(problem.native, i, budget, 10.0)
        assert not infeasible
        assert base + extra <= optimum + 1e-6


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(4, 30), shares, st.floats(1e-6, 10.0))
def test_the_first_price_does_not_matter(
    seed: int, num_layers: int, share: float, price: float
) -> None:
    problem = training_graph(seed, num_layers)
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    for i in range(0, len(problem.ops), 3):
        extra, infeasible, _, _ = _native.bound_at(problem.native, i, budget, 10.0)
        other = _native.bound_at(problem.native, i, budget, 10.0, price=price)
        if infeasible or other[1]:
            continue
        assert other[0] == pytest.approx(extra, rel=1e-4, abs=1e-3)
        # A moment is left early only where it cannot give more.
        assert _native.bound_at(problem.native, i, budget, 10.0, least=extra / 2)[0] >= extra / 2


@pytest.mark.parametrize(
    ("name", "share", "percent"),
    [
        ("RL2", 0.7, 0.29),
        ("RL3", 0.8, 0.39),
        ("RL3", 0.7, 2.18),
        ("RL4", 0.8, 1.21),
        ("RL4", 0.7, 3.94),
    ],
)
def test_published_instances(instances, name, share, percent) -> None:
    problem = read_problem(instances / f"{name}.json")
    base = simulate(problem, keep_all(problem))
    extra, infeasible = best_bound(problem, int(share * base.peak), 60.0)
    assert not infeasible
    assert 100 * extra / base.cost >= percent
