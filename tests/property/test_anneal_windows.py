"""Annealing stretch by stretch: within the budget, never worse than its start, repeatable."""

from random import Random

import pytest
from support.training_graphs import training_graph

from rekindle import _native
from rekindle.core import Problem, Schedule, keep_all, read_problem, simulate
from rekindle.core.generate import random_layered, random_problem, random_schedule


def anneal(
    problem: Problem, start: list[int], budget: int, moves: int, *, seed: int = 0, **options: object
) -> _native.AnnealResult:
    results, ended = _native.anneal(
        problem.native, [start], budget, _native.Objective.area, [seed], moves, 60.0, **options
    )
    assert ended == ""
    return results[0]


@pytest.mark.parametrize("seed", range(60))
def test_never_worse_than_the_start(seed: int) -> None:
    rng = Random(seed)
    if seed % 2:
        problem = random_problem(rng, rng.randint(1, 40), inplace=0.5, multi_output=0.3)
    else:
        problem = training_graph(seed, rng.randint(2, 12))
    start = list(random_schedule(problem, rng).ops)
    first = simulate(problem, Schedule(tuple(start)))
    result = anneal(problem, start, first.peak, 20_000, seed=seed, windows=True, hot=30.0)
    assert result.within
    trace = simulate(problem, Schedule(tuple(result.best)))
    assert (trace.cost, trace.peak) == (result.best_cost, result.best_peak)
    assert trace.peak <= first.peak
    assert trace.cost <= first.cost


def test_a_start_above_the_budget_is_annealed_as_a_whole() -> None:
    problem = random_layered(60)
    base = simulate(problem, keep_all(problem))
    start, budget = list(keep_all(problem).ops), int(0.9 * base.peak)
    whole = anneal(problem, start, budget, 30_000)
    assert anneal(problem, start, budget, 30_000, windows=True).best == whole.best
    assert whole.within


def test_the_same_seed_finds_the_same() -> None:
    problem = random_layered(120)
    base = simulate(problem, keep_all(problem))
    start = list(keep_all(problem).ops)
    one, same, other = (
        anneal(problem, start, base.peak, 50_000, seed=seed, windows=True) for seed in (1, 1, 2)
    )
    assert one.best == same.best
    assert one.accepted == same.accepted != other.accepted


def test_leads_out_of_where_annealing_ends(instances) -> None:
    """RL2 at 70 %: from where a short annealing ends to the best that is known."""
    problem = read_problem(instances / "RL2.json")
    base = simulate(problem, keep_all(problem))
    budget = int(0.7 * base.peak)
    start = anneal(problem, list(keep_all(problem).ops), budget, 300_000, seed=1)
    assert start.within
    assert start.best_cost > 1.01 * base.cost
    found = anneal(problem, list(start.best), budget, 1_000_000, windows=True, hot=30.0)
    assert found.best_cost <= 1.0057 * base.cost
