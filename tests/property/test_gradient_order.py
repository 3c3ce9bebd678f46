"""Where gradients alone do not fit: the order that a search begins from, and what `auto` finds."""

import pytest
from support.training_graphs import training_graph

from rekindle.core import Problem, Schedule, check_schedule, keep_all, simulate
from rekindle.core.generate import TrainingGraph, chain, random_problem
from rekindle.solve import find_solver, run_solver
from rekindle.solve.auto.start_order import gradients_alone, order_for
from rekindle.solve.base import trivial_floor
from rekindle.solve.min_budget import min_budget


def listed(problem: Problem) -> Schedule:
    return Schedule(tuple(range(len(problem.ops))))


def pyramid(num_stages: int = 4, num_blocks: int = 3) -> Problem:
    """As a ResNet: large activations first, large weights last, a branch beside each stage's first
    block."""
    graph = TrainingGraph()
    x = graph.resident("x", 64)
    size, weight = 1024, 4
    for stage in range(num_stages):
        for block in range(num_blocks):
            name, skip = f"{stage}.{block}", x
            if block == 0:
                skip = graph.forward(
                    f"{name}.proj", size // 32, [x], size, saves_inputs=True, weight_size=weight
                )
            for k in range(2):
                x = graph.forward(
                    f"{name}.conv{k}", size // 16, [x], size, saves_inputs=True,
                    weight_size=4 * weight,
                )  # fmt: skip
            x = graph.forward(f"{name}.add", size // 64, [x, skip], size, saves_output=True)
        size, weight = size // 2, 4 * weight
    y = graph.forward("head", 4, [x], 4, saves_inputs=True, weight_size=weight)
    return graph.finish([y], "pyramid")


@pytest.mark.parametrize("seed", range(40))
def test_every_op_once_and_no_more_for_gradients_than_as_listed(seed: int) -> None:
    problem = training_graph(seed, 4 + seed % 12)
    assert problem.loss_op is not None
    alone = gradients_alone(problem, problem.loss_op)
    as_listed = simulate(alone, listed(alone)).peak
    assert as_listed <= simulate(problem, listed(problem)).peak
    for budget in (as_listed, as_listed - 1, trivial_floor(problem), 0):
        order = order_for(problem, budget, 1.0)
        assert sorted(order.ops) == list(range(len(problem.ops)))
        check_schedule(problem, Schedule(tuple(order.ops)))
        peak = simulate(alone, Schedule(tuple(order.ops))).peak
        assert peak <= as_listed
        assert (order.tightest is None) == (peak <= budget)
        if as_listed <= budget:
            assert tuple(order.ops) == listed(problem).ops


def test_without_a_loss_the_order_is_as_listed() -> None:
    problem = next(p for p in map(random_problem, range(100)) if p.loss_op is None)
    assert tuple(order_for(problem, 0, 1.0).ops) == listed(problem).ops


def test_what_the_forward_makes_counts_beside_its_users_only() -> None:
    """A chain: its gradients need the same in every step, whatever the forward has made."""
    problem = chain(6, uniform=True)
    assert problem.loss_op is not None
    memory = simulate(gradients_alone(problem, problem.loss_op), keep_all(problem)).memory
    forward = memory[1 : problem.loss_op]
    assert len(set(forward)) == 1
    assert max(memory) < simulate(problem, keep_all(problem)).peak


@pytest.mark.parametrize("share", [0.6, 0.55, 0.5])
def test_auto_makes_gradients_again_at_little_cost(share: float) -> None:
    problem = pyramid()
    base = simulate(problem, keep_all(problem))
    budget = int(share * base.peak)
    assert order_for(problem, budget, 1.0).tightest is not None
    solution = run_solver(find_solver("auto"), problem, budget, time_limit_s=3.0)
    assert solution.schedule is not None
    assert solution.bound is not None
    trace = simulate(problem, solution.schedule)
    assert trace.peak <= budget
    assert any(
        runs > 1 and op.phase == "backward"
        for runs, op in zip(trace.runs, problem.ops, strict=True)
    )
    assert trace.cost <= 1.01 * solution.bound


def test_the_smallest_peak_is_met_by_auto() -> None:
    """What is named as the least is a budget that can be asked for."""
    problem = pyramid()
    least = simulate(problem, min_budget(problem, 2.0)).peak
    solution = run_solver(find_solver("auto"), problem, least, time_limit_s=3.0)
    assert solution.schedule is not None
