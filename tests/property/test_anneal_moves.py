"""The annealer's incremental state equals a full simulation, bit for bit, after every move."""

from random import Random

import pytest

from rekindle import _native
from rekindle.core import Schedule, keep_all, read_problem, simulate
from rekindle.core.generate import (
    random_layered,
    random_problem,
    random_schedule,
    transformer,
    unet,
)
from rekindle.solve.anneal.node_grouping import group_ops

MOVES = 1000


@pytest.mark.parametrize("seed", range(100))  # 10^5 moves in all
def test_random_moves_on_random_problems(seed):
    rng = Random(seed)
    problem = random_problem(rng, rng.randint(1, 40), inplace=0.5, multi_output=0.3)
    start = list(random_schedule(problem, rng).ops)
    peak = simulate(problem, Schedule(tuple(start))).peak
    made = _native.check_moves(problem.native, start, rng.randint(0, peak), seed, MOVES)
    assert made >= 0, "memory, cost or runs differ from the simulation"


def test_the_moves_are_made():
    """The check above is worth something only if many moves are accepted."""
    made = 0
    for seed in range(20):
        problem = random_problem(seed, 30, inplace=0.5)
        made += _native.check_moves(problem.native, list(keep_all(problem).ops), 50, seed, MOVES)
    assert made > 20 * MOVES // 10


@pytest.mark.parametrize("name", ["RL1", "RL2", "CM1"])
def test_random_moves_on_published_instances(name, instances):
    problem = read_problem(instances / f"{name}.json")
    start = list(keep_all(problem).ops)
    budget = simulate(problem, keep_all(problem)).peak * 3 // 4
    assert _native.check_moves(problem.native, start, budget, 7, 5 * MOVES) > MOVES


@pytest.mark.parametrize("make", [lambda: transformer(3, dropout=True), lambda: unet(3)])
def test_random_moves_on_training_graphs(make):
    problem = make()
    start = list(keep_all(problem).ops)
    budget = simulate(problem, keep_all(problem)).peak // 2
    assert _native.check_moves(problem.native, start, budget, 3, 3 * MOVES) > MOVES


def test_random_moves_on_a_long_line():
    """Beyond a few thousand steps the blocks of the memory array are larger."""
    problem = random_layered(6000)
    start = list(keep_all(problem).ops)
    budget = simulate(problem, keep_all(problem)).peak * 3 // 4
    assert _native.check_moves(problem.native, start, budget, 5, MOVES) > MOVES // 10


def test_excess_is_exact_for_huge_sizes():
    """Sums of excess beyond 64 bits are counted in larger units, memory is not."""
    problem = random_problem(5, 25, max_size=2**54, inplace=0.5)
    start = list(keep_all(problem).ops)
    assert _native.check_moves(problem.native, start, 2**53, 1, 2 * MOVES) > 0


@pytest.mark.parametrize("seed", range(60))
def test_groups_written_out_need_no_more(seed):
    """A schedule of groups is valid when written out, with at most the groups' peak and cost."""
    rng = Random(1000 + seed)
    problem = random_problem(rng, rng.randint(3, 30), dead=0.0, resident=0.1, once=0.05)
    grouping = group_ops(problem, max_members=rng.choice([2, 5, 48]))
    for reorder in (False, True):
        groups = random_schedule(grouping.problem, rng, reorder=reorder)
        grouped = simulate(grouping.problem, groups)
        single = simulate(problem, Schedule(tuple(grouping.expand(problem, groups.ops))))
        assert single.peak <= grouped.peak
        assert single.cost <= grouped.cost


def test_groups_form():
    grouping = group_ops(transformer(3))
    assert not grouping.trivial
    assert len(grouping.problem.ops) < len(transformer(3).ops)


def test_log_add_exp_survives_growth():
    """The line is spread anew, with more blocks, while a smooth peak is kept."""
    problem = random_problem(2, 120, dead=0.0)
    start = list(keep_all(problem).ops)
    results, _ = _native.anneal(
        problem.native, [start], 1, _native.Objective.custom, [0], 60_000, 60.0,
        hot=1.0, cold=1.0, smooth=5.0, paper_moves=True, custom=lambda peak, cost: -cost,
    )  # fmt: skip
    assert results[0].accepted > 100


def assert_noted(problem, budget, seed, num_moves, ratchet):
    start = list(keep_all(problem).ops)
    results, _ = _native.anneal(
        problem.native, [start], budget, _native.Objective.area, [seed], num_moves, 60.0,
        ratchet=ratchet,
    )  # fmt: skip
    result = results[0]
    assert result.best or result.smallest
    if result.best:
        trace = simulate(problem, Schedule(tuple(result.best)))
        assert (trace.cost, trace.peak) == (result.best_cost, result.best_peak)
        assert trace.peak <= budget
    if result.smallest:
        trace = simulate(problem, Schedule(tuple(result.smallest)))
        assert (trace.cost, trace.peak) == (result.smallest_cost, result.smallest_peak)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_noted_down_is_what_was_there(seed):
    """The best schedules are copied slot by slot as moves are made; cost and peak were those of the
    incremental state at that moment."""
    rng = Random(seed)
    size = rng.randint(2, 60) if seed % 2 else rng.randint(200, 600)
    problem = random_problem(rng, size, inplace=0.5, multi_output=0.3, dead=0.0)
    budget = simulate(problem, keep_all(problem)).peak * rng.randint(40, 95) // 100
    assert_noted(problem, budget, seed, 20_000, ratchet=False)
    assert_noted(problem, budget, seed, 20_000, ratchet=True)


def test_what_is_noted_down_survives_a_line_spaced_anew():
    """The peak falls before and after; some of these runs end soon after."""
    problem = transformer(12)
    budget = simulate(problem, keep_all(problem)).peak // 5
    for num_moves in range(4096, 30_000, 1024):
        assert_noted(problem, budget, 0, num_moves, ratchet=True)
