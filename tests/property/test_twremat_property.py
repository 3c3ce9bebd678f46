"""twremat on random training graphs: valid, within budget, never better than the optimum."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_graphs import cheapest, training_graph

from rekindle.core import Status, keep_all, simulate
from rekindle.partition.treewidth import OpGraph, eliminate, separator_tree
from rekindle.solve import run_solver
from rekindle.solve.base import without_dead_ops
from rekindle.solve.twremat import Recursion, TWRemat


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 25), st.floats(0.2, 1.0))
def test_every_answer_is_valid_and_within_budget(seed, num_layers, share):
    problem = training_graph(seed, num_layers)
    plain = simulate(problem, keep_all(problem))
    budget = int(plain.peak * share)
    solution = run_solver(TWRemat(), problem, budget)
    if solution.schedule is None:
        assert solution.status in (Status.INFEASIBLE, Status.TIME_LIMIT)
        assert simulate(problem, solution.smallest).peak > budget
        return
    trace = simulate(problem, solution.schedule)
    assert trace.peak <= budget
    assert solution.schedule == run_solver(TWRemat(), problem, budget).schedule


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 30))
def test_decomposition_covers_every_edge_and_separates(seed, num_layers):
    graph = OpGraph.of(training_graph(seed, num_layers))
    bags, width = eliminate(graph, 60)
    assert width == max(len(bag.vertices) for bag in bags) - 1
    homes = [
        {b for b, bag in enumerate(bags) if v in bag.vertices} for v in range(len(graph.inputs))
    ]
    for v, inputs in enumerate(graph.inputs):
        assert all(homes[v] & homes[u] for u in inputs)
        # The bags of one vertex are connected, so that a bag separates what hangs on it.
        start = min(homes[v])
        seen, work = {start}, [start]
        while work:
            fresh = {b for b in bags[work.pop()].neighbours if b in homes[v]} - seen
            seen |= fresh
            work.extend(fresh)
        assert seen == homes[v]
    nodes = separator_tree(bags, len(graph.inputs))
    assert sorted(v for node in nodes for v in node.own) == list(range(len(graph.inputs)))
    above: list[set[int]] = [set() for _ in nodes]
    for t, node in enumerate(nodes):
        for child in node.children:
            above[child] = above[t] | set(node.own)
    for t, node in enumerate(nodes):
        inside = set(node.span)
        for v in node.span:
            assert all(u in inside or u in above[t] for u in graph.inputs[v])
        outside = [v for v in range(len(graph.inputs)) if v not in inside]
        assert all(v in above[t] for v in outside if any(u in inside for u in graph.inputs[v]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(0, 8))
def test_recursion_is_executable_and_as_long_as_it_says(seed, num_layers, depth):
    problem, _ = without_dead_ops(training_graph(seed, num_layers))
    graph = OpGraph.of(problem)
    recursion = Recursion(graph, separator_tree(eliminate(graph, 60)[0], len(graph.inputs)))
    sequence = recursion.sequence(graph.targets, depth)
    assert recursion.length(graph.targets, depth, 10**9) == len(sequence)
    done: set[int] = set()
    for i in sequence:
        assert done.issuperset(graph.inputs[i])
        done.add(i)
    assert done.issuperset(graph.targets)


@pytest.mark.parametrize("seed", range(25))
def test_never_better_than_the_optimum_and_close_to_it(seed):
    problem, _ = without_dead_ops(training_graph(seed, 3, extras=seed % 2 == 0, inplace=False))
    plain = simulate(problem, keep_all(problem))
    for budget in range(plain.peak - 1, plain.peak // 2, -3):
        best = cheapest(problem, budget)
        solution = run_solver(TWRemat(), problem, budget)
        if best is None:
            assert solution.schedule is None
        elif solution.schedule is not None:
            assert simulate(problem, solution.schedule).cost >= best
