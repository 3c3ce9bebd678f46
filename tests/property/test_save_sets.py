"""Schedules from save sets: valid, within the budget, never below the optimum or the bound."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brute_force
from support.training_graphs import training_graph

from rekindle import _native
from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.core.generate import chain, random_problem, transformer
from rekindle.solve.auto.incumbent import alike_values
from rekindle.solve.base import without_dead_ops
from rekindle.solve.lower_bound import best_bound

shares = st.sampled_from([0.95, 0.85, 0.7, 0.55, 0.4])


def climb(
    problem: Problem, share: float, *, seeds: tuple[int, ...] = (0, 1), tries: int = 40
) -> tuple[int, list[list[int]], int]:
    base = simulate(problem, keep_all(problem))
    moment = problem.loss_op
    if moment is None:
        moment = max(range(len(base.memory)), key=base.memory.__getitem__)
    budget = int(share * base.peak)
    order = list(range(len(problem.ops)))
    found, made, ended = _native.search_save_sets(
        problem.native, order, moment, alike_values(problem), budget, list(seeds), tries, 60.0, 2
    )
    assert ended == ""
    return budget, found, made


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(3, 14), shares)
def test_training_graphs(seed: int, num_layers: int, share: float) -> None:
    problem, _ = without_dead_ops(training_graph(seed, num_layers))
    budget, found, tries = climb(problem, share)
    assert tries <= 80
    extra, infeasible = best_bound(problem, budget, 10.0)
    for ops in found:
        trace = simulate(problem, Schedule(tuple(ops)))
        assert not infeasible
        assert trace.peak <= budget
        assert trace.cost >= sum(op.cost for op in problem.ops) + extra


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(3, 7), shares)
def test_any_graph_against_brute_force(seed: int, num_ops: int, share: float) -> None:
    problem, _ = without_dead_ops(random_problem(seed, num_ops=num_ops))
    budget, found, _ = climb(problem, share)
    optimum = brute_force.cheapest(problem, budget)
    for ops in found:
        assert optimum is not None
        assert simulate(problem, Schedule(tuple(ops))).cost >= optimum.cost


def test_close_to_the_bound_in_few_tries() -> None:
    problem = transformer(12)
    base = simulate(problem, keep_all(problem)).cost
    for share in (0.8, 0.6, 0.4):
        budget, found, _ = climb(problem, share, tries=200)
        extra, _ = best_bound(problem, budget, 10.0)
        best = min(simulate(problem, Schedule(tuple(ops))).cost for ops in found)
        assert best <= base + extra + 0.005 * base


def test_a_loss_that_leaves_room_for_little_is_no_matter_of_luck() -> None:
    """A few places to begin again from, each stretch kept whole once it is made again."""
    problem = chain(150)
    base, loss = simulate(problem, keep_all(problem)), problem.loss_op
    assert loss is not None
    budget = int(0.3 * base.peak)
    ops = list(problem.ops)
    ops[loss] = replace(ops[loss], workspace=ops[loss].workspace + int(0.95 * budget))
    tight = replace(problem, ops=tuple(ops))
    found, _, _ = _native.search_save_sets(
        tight.native, list(range(len(ops))), loss, alike_values(tight), budget,
        list(range(6)), 60, 60.0, 2,
    )  # fmt: skip
    costs = [simulate(tight, Schedule(tuple(schedule))).cost for schedule in found]
    assert len(costs) == 6
    assert max(costs) <= 1.302 * base.cost  # the bound is 1.287; without such places 1.31 to 1.34
    assert max(costs) - min(costs) <= 0.003 * base.cost


def test_the_same_seeds_find_the_same() -> None:
    problem = training_graph(5, 30)
    assert climb(problem, 0.6, seeds=(3, 4)) == climb(problem, 0.6, seeds=(3, 4))


def test_a_moment_or_an_order_that_does_not_fit_is_refused() -> None:
    problem = training_graph(1, 4)
    order = list(range(len(problem.ops)))
    for bad_order, moment in ((order, len(order)), (order, -1), (order[1:], 0)):
        with pytest.raises(ValueError, match="order"):
            _native.search_save_sets(
                problem.native, bad_order, moment, alike_values(problem), 100, [0], 5, 1.0
            )
