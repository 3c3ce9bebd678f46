"""hiremate and rockmate: refusals, structure, identical parts, and quality beside the optimum."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.clocks import JumpingClock, count_lines

from rekindle.core import Problem, Status, keep_all, read_problem, simulate
from rekindle.core.generate import TrainingGraph, chain, transformer, unet
from rekindle.errors import SolverRefused
from rekindle.partition.hierarchy import HPartition, intervals
from rekindle.partition.layer_graph import Graph, Group, layer_graph, read_layers
from rekindle.partition.parts import cut_part
from rekindle.partition.separators import find_rows
from rekindle.solve import find_solver, run_solver
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.hierarchy.option_makers import ByTWRemat, keep_everything
from rekindle.solve.hierarchy.options import Option, measure
from rekindle.solve.hierarchy.rockmate import Blocks, ByCheckmate, Rockmate
from rekindle.solve.staged.checkmate import Checkmate

INSTANCES = Path(__file__).parents[2] / "instances"


def overhead(problem: Problem, solution) -> float:
    plain = simulate(problem, keep_all(problem))
    return simulate(problem, solution.schedule).cost / plain.cost - 1


@pytest.mark.parametrize("name", ["hiremate", "rockmate"])
def test_a_graph_without_phases_is_refused_with_a_reason(name):
    problem = read_problem(INSTANCES / "RL1.json")
    with pytest.raises(SolverRefused, match="no phase"):
        run_solver(find_solver(name), problem, 10**9)


def test_a_forward_that_reads_the_backward_is_refused():
    graph = TrainingGraph()
    x = graph.forward("f", 1, [graph.resident("x")], 4, weight_size=4, saves_inputs=True)
    problem = graph.finish([x], "one")
    assert HiRemate().accepts(problem) is None
    ops = [*problem.ops]
    ops[0], ops[1] = ops[1], ops[0]
    assert HiRemate().accepts(Problem(problem.values, tuple(problem.ops[:1]))) is not None


@pytest.mark.parametrize(
    ("problem", "share", "points"),
    [
        (chain(8), 0.85, 1.0),
        (chain(12, seed=1), 0.7, 1.0),
        (transformer(1, batch=16), 0.8, 1.0),
        pytest.param(unet(1, pixels=128 * 128), 0.9, 1.0, marks=pytest.mark.slow),
    ],
    ids=lambda x: x.name if isinstance(x, Problem) else str(x),
)
def test_close_to_the_optimum_of_the_listed_order(problem, share, points):
    budget = int(simulate(problem, keep_all(problem)).peak * share)
    ours = run_solver(HiRemate(), problem, budget, time_limit_s=30)
    best = run_solver(Checkmate(), problem, budget, time_limit_s=30)
    assert ours.schedule is not None
    assert best.bound is not None
    plain = simulate(problem, keep_all(problem)).cost
    assert 100 * (overhead(problem, ours) - (best.bound / plain - 1)) <= points


def test_a_budget_below_every_schedule_is_infeasible_with_the_smallest_peak():
    problem = transformer(1)
    solution = run_solver(HiRemate(), problem, 10, time_limit_s=10)
    assert solution.status is Status.INFEASIBLE
    assert simulate(problem, solution.smallest).peak < simulate(problem, keep_all(problem)).peak


def test_a_budget_that_needs_nothing_is_answered_at_once():
    problem = transformer(4)
    budget = simulate(problem, keep_all(problem)).peak
    for solver in (HiRemate(), Rockmate()):
        solution = run_solver(solver, problem, budget, time_limit_s=30)
        assert solution.status is Status.OPTIMAL


def test_layers_that_are_alike_are_one_part():
    problem = chain(30, uniform=True)
    layers = read_layers(problem)
    forms = {cut_part(problem, layers, (j,)).form for j in range(1, 29)}
    assert len(forms) == 1
    tree = HPartition(max_top=6, max_group=4).partition(layer_graph(problem, layers))
    groups = [g.layers for g in tree.walk() if g is not tree and 0 not in g.layers]
    by_size = {len(g) for g in groups}
    assert len({cut_part(problem, layers, g).form for g in groups}) <= len(by_size) + 1


def test_an_option_of_one_part_is_an_option_of_its_twin():
    problem = chain(12, uniform=True)
    layers = read_layers(problem)
    one, other = cut_part(problem, layers, (2, 3, 4)), cut_part(problem, layers, (6, 7, 8))
    assert one.form == other.form
    for option in ByTWRemat()(one, 5.0):
        assert measure(other, option.forward, option.backward) == option


def test_checkmate_options_are_at_least_as_good_as_the_walk():
    problem = transformer(1, batch=16)
    rows = find_rows(problem)
    assert not isinstance(rows, str)
    part = max(Blocks(problem, rows).parts, key=lambda p: len(p.ops))
    quick = ByTWRemat(2, 3)(part, 5.0)
    exact = ByCheckmate(2, 3, time_per_program_s=10.0)(part, 30.0)
    assert min(o.cost for o in exact) <= min(o.cost for o in quick)
    assert {o.saved for o in exact} != {max(o.saved for o in exact)}


def test_rockmate_uses_what_is_inside_a_block():
    """Keeping part of a block beats Rotor's all or nothing."""
    problem = transformer(6, batch=16)
    budget = int(simulate(problem, keep_all(problem)).peak * 0.6)
    rock = run_solver(Rockmate(makers=(ByTWRemat(),)), problem, budget, time_limit_s=30)
    rotor = run_solver(find_solver("rotor"), problem, budget, time_limit_s=30)
    assert overhead(problem, rock) <= overhead(problem, rotor)


def test_intervals_cut_where_little_crosses():
    sizes = (9, 9, 1, 9, 9, 1, 9, 9)
    graph = Graph(
        edges=((), *((k,) for k in range(8))),
        reads=((), *((k,) for k in range(8))),
        makes=(*((k,) for k in range(8)), ()),
        leaves=frozenset(),
        size=sizes,
        weight=(1,) * 9,
    )
    assert intervals(graph, 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


@dataclass(frozen=True)
class Halves:
    """A partitioner of one's own."""

    def partition(self, graph: Graph) -> Group:
        half = len(graph) // 2
        parts = (range(half), range(half, len(graph)))
        groups = (Group(tuple(p), tuple(Group((x,)) for x in p)) for p in parts)
        return Group(tuple(range(len(graph))), tuple(groups))


def test_partitioner_and_makers_are_replaceable():
    calls = []

    def my_maker(part, time_limit_s) -> list[Option]:
        calls.append(len(part.ops))
        return keep_everything(part, time_limit_s)

    problem = transformer(1, batch=16)
    budget = int(simulate(problem, keep_all(problem)).peak * 0.8)
    solver = HiRemate(partitioner=Halves(), makers=(my_maker,), whole=())
    solution = run_solver(solver, problem, budget, time_limit_s=20)
    assert calls
    assert solution.schedule is not None


def test_partitioning_a_large_graph_takes_near_linear_time():
    num_lines = []
    for num_blocks in (20, 200):  # 2,400 layers
        problem = transformer(num_blocks)
        graph = layer_graph(problem, read_layers(problem))
        num_lines.append(count_lines(lambda graph=graph: HPartition().partition(graph)))
    assert num_lines[1] < 15 * num_lines[0]


def test_partitioning_a_large_graph():
    problem = transformer(600)  # 7,200 layers
    tree = HPartition().partition(layer_graph(problem, read_layers(problem)))
    assert len(tree.children) <= 12
    assert tree.depth <= 8


@pytest.mark.parametrize("jump_at", [12, 60])
def test_the_time_limit_is_kept(jump_at, monkeypatch):
    problem = transformer(50)
    budget = int(simulate(problem, keep_all(problem)).peak * 0.5)
    with JumpingClock(monkeypatch, 2.0, jump_at) as clock:
        solution = run_solver(HiRemate(threads=1), problem, budget, time_limit_s=2.0)
    clock.assert_kept(len(problem.ops))
    assert solution.stopped_by == "time limit"


def test_without_makers_there_is_still_a_way_to_run_each_part():
    problem = chain(40, seed=2)
    budget = int(simulate(problem, keep_all(problem)).peak * 0.85)
    solver = HiRemate(makers=(), ilp_budgets=(), whole=(), polish_moves=0)
    solution = run_solver(solver, problem, budget, time_limit_s=30)
    assert simulate(problem, solution.schedule).peak <= budget


def test_a_run_that_has_time_for_everything_was_stopped_by_nothing():
    problem = chain(10)
    budget = int(simulate(problem, keep_all(problem)).peak * 0.85)
    assert run_solver(HiRemate(), problem, budget, time_limit_s=120).stopped_by == ""


def test_sizes_beyond_the_precision_of_a_float():
    problem = chain(6)
    values = tuple(dataclasses.replace(v, size=v.size * 2**40 + 1) for v in problem.values)
    problem = dataclasses.replace(problem, values=values)
    budget = 4 * simulate(problem, keep_all(problem)).peak // 5
    while float(budget) >= budget:
        budget += 1
    solution = run_solver(HiRemate(), problem, budget, time_limit_s=5)
    assert solution.schedule is None or simulate(problem, solution.schedule).peak <= budget
