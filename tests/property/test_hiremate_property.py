"""hiremate, rockmate and their parts on random training graphs with skips, several inputs, shared
parameters, workspaces, second outputs, run-once and in-place ops."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_graphs import cheapest, training_graph

from rekindle.core import Schedule, Status, check_problem, keep_all, simulate
from rekindle.partition.hierarchy import HPartition, dominators
from rekindle.partition.layer_graph import Group, layer_graph, quotient, read_layers
from rekindle.partition.parts import cut_part
from rekindle.solve import run_solver
from rekindle.solve.base import without_dead_ops
from rekindle.solve.hierarchy.hierarchy_level import Child, lower_plan
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.hierarchy.level_milp import LevelModel
from rekindle.solve.hierarchy.option_makers import ByFastSA, ByRotor, ByTWRemat, keep_everything
from rekindle.solve.hierarchy.options import bare, measure
from rekindle.solve.hierarchy.rockmate import Rockmate
from rekindle.solve.hierarchy.tree import Tree, top_level

SEEDS = st.integers(0, 10**6)
QUICK = HiRemate(
    partitioner=HPartition(max_top=4, max_group=3),
    max_options=4,
    ilp_budgets=((1.0, 0.5),),
    ilp_time_s=1.0,
    top_time_s=2.0,
)
# Makers that reorder, and cut chains, on parts of any size.
MANY = replace(
    QUICK, makers=(keep_everything, ByRotor(2, 2, min_blocks=2), ByFastSA(2, 2, 50, 2)), whole=()
)


def convex(graph, members):
    """No path from a member to a member goes through others; by plain search."""
    inside, reached = set(members), set()
    for x in range(len(graph)):
        if x in inside:
            continue
        if any(y in inside or y in reached for y in graph.edges[x]):
            reached.add(x)
    return not any(y in reached for x in inside for y in graph.edges[x])


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(1, 60), st.integers(2, 10), st.integers(2, 8))
def test_every_group_is_convex_and_small(seed, num_layers, max_top, max_group):
    problem = training_graph(seed, num_layers, reach=seed % 9 + 1)
    graph = layer_graph(problem, read_layers(problem))
    tree = HPartition(max_top=max_top, max_group=max_group).partition(graph)
    assert tree.layers == tuple(range(len(graph)))
    assert len(tree.children) <= max(max_top, max_group)
    for group in tree.walk():
        assert convex(graph, group.layers)
        assert sorted(x for c in group.children for x in c.layers) == list(group.layers)
        # The children can run in the order in which they stand.
        place = {x: k for k, c in enumerate(group.children) for x in c.layers}
        for x in group.layers:
            assert all(place[y] <= place[x] for y in graph.edges[x] if y in place)
        if group is not tree:
            assert len(group.children) <= max_group


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(1, 40))
def test_dominators_are_those_of_the_definition(seed, num_layers):
    problem = training_graph(seed, num_layers, reach=seed % 7 + 1)
    graph = layer_graph(problem, read_layers(problem))
    through: list[set[int]] = []
    for x, before in enumerate(graph.edges):
        common = set.intersection(*(through[y] for y in before)) if before else set()
        through.append(common | {x})
    for x, above in enumerate(dominators(graph)):
        assert above == max(through[x] - {x}, default=-1)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 30))
def test_backward_of_the_layers_runs_in_reverse(seed, num_layers):
    problem, _ = without_dead_ops(training_graph(seed, num_layers))
    layers = read_layers(problem)
    for i, op in enumerate(problem.ops):
        if op.phase != "backward":
            continue
        for v in op.inputs:
            by = problem.producer[v]
            if by >= 0 and problem.ops[by].phase == "backward":
                assert layers.layer_of[by] >= layers.layer_of[i]
    members = sorted(i for x in layers.layers for i in (x.forward, *x.backward))
    assert members == [i for i, op in enumerate(problem.ops) if op.phase != "loss"]


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(2, 20), st.data())
def test_parts_are_problems_and_their_options_measure_as_they_run(seed, num_layers, data):
    problem, _ = without_dead_ops(training_graph(seed, num_layers))
    layers = read_layers(problem)
    first = data.draw(st.integers(0, len(layers.layers) - 1))
    end = data.draw(st.integers(first + 1, len(layers.layers)))
    part = cut_part(problem, layers, range(first, end))
    check_problem(part.problem)
    makers = (keep_everything, ByTWRemat(2, 2), ByRotor(2, 2, min_blocks=2), ByFastSA(2, 2, 50, 2))
    for option in (option for maker in makers for option in maker(part, 1.0)):
        loss = part.problem.loss_op
        schedule = Schedule((*option.forward, loss, *option.backward))
        trace = simulate(part.problem, schedule)
        assert trace.cost == option.cost
        assert measure(part, option.forward, option.backward) == option
        # With everything that leaves counted all the time, it is never less than simulated.
        out = sum(part.problem.values[v].size for v in part.forward_out)
        leaving = sum(part.problem.values[v].size for v in part.problem.outputs)
        peak = max(option.forward_peak, option.backward_peak)
        assert trace.peak <= peak + out + leaving


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(2, 12), st.floats(0.4, 1.3))
def test_a_plan_costs_and_needs_what_the_program_believes(seed, num_layers, share):
    problem, _ = without_dead_ops(training_graph(seed, num_layers))
    layers = read_layers(problem)
    groups = [Group((j,)) for j in range(len(layers.layers))]
    tree = Tree(QUICK.recipe, problem, layers, 0, float("inf"))
    level = top_level(problem, tree.children(groups))
    budget = int(simulate(problem, keep_all(problem)).peak * share)
    plan, _ = LevelModel(level, budget).solve(budget, time_limit_s=5.0, rel_gap=0.0)
    if plan is None:
        return
    forward, backward = lower_plan(level, plan)
    loss = [] if problem.loss_op is None else [problem.loss_op]
    trace = simulate(problem, Schedule((*forward, *loss, *backward)))
    assert trace.peak <= budget
    own = sum(problem.ops[i].cost for i in loss)
    assert abs(trace.cost - own - plan.cost) < 1e-3 * max(1, trace.cost)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 14), st.floats(0.3, 1.0), st.sampled_from((QUICK, MANY)))
def test_hiremate_is_valid_and_within_budget(seed, num_layers, share, solver):
    problem = training_graph(seed, num_layers)
    plain = simulate(problem, keep_all(problem))
    budget = int(plain.peak * share)
    solution = run_solver(solver, problem, budget, time_limit_s=20)
    assert solution.status is not Status.ERROR
    if solution.schedule is None:
        assert solution.status in (Status.INFEASIBLE, Status.TIME_LIMIT)
        return
    assert simulate(problem, solution.schedule).peak <= budget


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 14), st.floats(0.3, 1.0))
def test_rockmate_is_valid_and_within_budget(seed, num_layers, share):
    problem, _ = without_dead_ops(training_graph(seed, num_layers, reach=1 + seed % 2))
    solver = Rockmate(makers=(ByTWRemat(2, 3),))
    if solver.accepts(problem) is not None:
        return
    budget = int(simulate(problem, keep_all(problem)).peak * share)
    solution = run_solver(solver, problem, budget, time_limit_s=20)
    if solution.schedule is not None:
        assert simulate(problem, solution.schedule).peak <= budget


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_hiremate_is_never_better_than_the_optimum(seed):
    problem, _ = without_dead_ops(training_graph(seed, 3, inplace=False))
    plain = simulate(problem, keep_all(problem))
    budget = plain.peak - 1 - seed % max(1, plain.peak // 3)
    best = cheapest(problem, budget)
    solution = run_solver(QUICK, problem, budget, time_limit_s=10)
    if solution.schedule is not None:
        assert best is not None
        assert simulate(problem, solution.schedule).cost >= best


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(2, 25))
def test_quotients_keep_what_crosses(seed, num_layers):
    problem, _ = without_dead_ops(training_graph(seed, num_layers))
    graph = layer_graph(problem, read_layers(problem))
    half = len(graph) // 2
    parts = [list(range(half)), list(range(half, len(graph)))] if half else [[0]]
    small, order = quotient(graph, parts)
    assert len(small) == len(parts)
    assert sum(small.weight) == len(graph)
    made = {v for p in small.makes for v in p}
    assert all(v in made for reads in small.reads for v in reads)
    assert sorted(order) == list(range(len(parts)))


def test_a_child_without_options_is_never_made():
    problem, _ = without_dead_ops(training_graph(3, 6))
    layers = read_layers(problem)
    part = cut_part(problem, layers, (0,))
    child = Child(part, tuple(keep_everything(part, 0.0)), bare(part))
    assert len(child.options) == 1
