"""Large neighbourhoods: never dearer than the start, within the budget, never below the optimum."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brute_force
from support.training_graphs import training_graph

from rekindle import _native
from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.core.generate import random_problem, random_schedule, transformer
from rekindle.solve.base import without_dead_ops


def check(problem: Problem, start: Schedule, budget: int, tries: int = 30) -> list[list[int]]:
    found, made, ended = _native.large_neighbourhood_search(
        problem.native, [list(start.ops)], budget, [0, 1], tries, 60.0, 2
    )
    assert (made, ended) == (2 * tries, "")
    before = simulate(problem, start).cost
    for ops in found:
        trace = simulate(problem, Schedule(tuple(ops)))
        assert trace.peak <= budget
        assert trace.cost <= before
    return found


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(3, 14), st.sampled_from([1.0, 0.95, 0.8]))
def test_training_graphs(seed: int, num_layers: int, share: float) -> None:
    problem, _ = without_dead_ops(training_graph(seed, num_layers))
    order = list(range(len(problem.ops)))
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    fits, ops = _native.evict(problem.native, order, budget, 40 * len(order), 10.0)
    if fits:
        check(problem, Schedule(tuple(ops)), budget)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(3, 7), st.integers(0, 20))
def test_any_schedule_against_brute_force(seed: int, num_ops: int, slack: int) -> None:
    problem, _ = without_dead_ops(random_problem(seed, num_ops=num_ops))
    start = random_schedule(problem, seed, repeats=0.5)
    budget = simulate(problem, start).peak + slack
    optimum = brute_force.cheapest(problem, budget)
    assert optimum is not None
    for ops in check(problem, start, budget):
        assert simulate(problem, Schedule(tuple(ops))).cost >= optimum.cost


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(3, 7), st.integers(0, 20), st.sampled_from([0.0, 0.05]))
def test_parts_of_several_starts(seed: int, num_ops: int, slack: int, hot: float) -> None:
    """Schedules of any order of the ops; each search ends no dearer than it began."""
    problem, _ = without_dead_ops(random_problem(seed, num_ops=num_ops))
    starts = [random_schedule(problem, seed + k, repeats=0.5) for k in range(3)]
    traces = [simulate(problem, start) for start in starts]
    budget = max(trace.peak for trace in traces) + slack
    optimum = brute_force.cheapest(problem, budget)
    assert optimum is not None
    found, made, ended = _native.large_neighbourhood_search(
        problem.native, [list(s.ops) for s in starts], budget, [0, 1, 2], 30, 60.0, 2, hot
    )
    assert (len(found), made, ended) == (3, 90, "")
    for ops, before in zip(found, traces, strict=True):
        trace = simulate(problem, Schedule(tuple(ops)))
        assert trace.peak <= budget
        assert optimum.cost <= trace.cost <= before.cost


def test_what_cannot_be_a_start_is_refused() -> None:
    problem = training_graph(2, 5)
    plain = keep_all(problem)
    peak = simulate(problem, plain).peak
    for starts, budget in (([], peak), ([list(plain.ops)], peak - 1), ([[0]], peak)):
        with pytest.raises(ValueError, match="start"):
            _native.large_neighbourhood_search(problem.native, starts, budget, [0], 5, 1.0)


def test_walks_follow_an_order_that_repeats_ops() -> None:
    """What the order makes again is not kept until there: walking a walk's result changes nothing
    for the worse."""
    problem = transformer(4)
    plain = keep_all(problem)
    budget = int(0.6 * simulate(problem, plain).peak)
    fits, ops = _native.evict(problem.native, list(plain.ops), budget, 4000, 10.0)
    assert fits
    fits, again = _native.evict(problem.native, ops, budget, 4000, 10.0)
    assert fits
    first, second = (simulate(problem, Schedule(tuple(s))) for s in (ops, again))
    assert second.cost <= first.cost
    assert second.peak <= budget
