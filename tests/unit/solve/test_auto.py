"""`auto` and its parts: the exact search, the bound, the policies, the curve."""

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import brute_force
from support.training_graphs import cheapest, training_graph

from rekindle import _native
from rekindle.core import Problem, Schedule, keep_all, read_problem, simulate
from rekindle.core.generate import chain, random_problem, transformer
from rekindle.core.solution import Status
from rekindle.errors import SolverRefused
from rekindle.solve import find_solver, run_solver
from rekindle.solve.auto.auto import Auto, _Search
from rekindle.solve.auto.incumbent import alike_values
from rekindle.solve.base import trivial_floor, without_dead_ops
from rekindle.solve.lower_bound import best_bound
from rekindle.solve.min_budget import min_budget
from rekindle.solve.pareto import Point, envelope, pareto

AUTO = find_solver("auto")
tiny = st.builds(
    lambda seed, num_ops: without_dead_ops(random_problem(seed, num_ops=num_ops))[0],
    st.integers(0, 10**6),
    st.integers(3, 7),
)
shares = st.sampled_from([1.0, 0.9, 0.75, 0.6])


def cost_of(problem: Problem, ops: list[int]) -> tuple[int, int]:
    trace = simulate(problem, Schedule(tuple(ops)))
    return trace.cost, trace.peak


@settings(max_examples=150)
@given(tiny, shares)
def test_exact_is_brute_force(problem: Problem, share: float) -> None:
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    if _native.exact_bits(problem.native) > 64:
        return
    finished, feasible, ops = _native.solve_exact(problem.native, budget, 30.0)
    optimum = brute_force.cheapest(problem, budget)
    assert finished
    assert feasible == (optimum is not None)
    if optimum is not None:
        cost, peak = cost_of(problem, ops)
        assert peak <= budget
        assert cost == optimum.cost
        assert _native.solve_exact(problem.native, budget, 30.0, below=cost)[:2] == (True, False)
        finished, feasible, ops = _native.solve_exact(problem.native, budget, 30.0, below=cost + 1)
        assert finished
        assert feasible
        assert cost_of(problem, ops)[0] == cost


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 3), shares)
def test_exact_is_the_search_over_all_states(seed: int, num_layers: int, share: float) -> None:
    problem, _ = without_dead_ops(training_graph(seed, num_layers, inplace=False))
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    if _native.exact_bits(problem.native) > 64:
        return
    finished, feasible, ops = _native.solve_exact(problem.native, budget, 30.0)
    assert finished
    assert (cost_of(problem, ops)[0] if feasible else None) == cheapest(problem, budget)


def test_exact_keeps_its_limit_of_states() -> None:
    problem = chain(7)
    budget = int(0.8 * simulate(problem, keep_all(problem)).peak)
    assert _native.solve_exact(problem.native, budget, 30.0, max_states=10)[:2] == (False, False)
    finished, feasible, ops = _native.solve_exact(problem.native, budget, 30.0)
    assert finished
    assert feasible
    assert cost_of(problem, ops)[1] <= budget


@settings(max_examples=150)
@given(tiny, shares)
def test_bound_is_never_above_the_optimum(problem: Problem, share: float) -> None:
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    optimum = brute_force.cheapest(problem, budget)
    extra, infeasible = best_bound(problem, budget, 10.0)
    if optimum is None:
        return
    assert not infeasible
    assert sum(op.cost for op in problem.ops) + extra <= optimum.cost


def test_bound_says_when_an_op_alone_does_not_fit() -> None:
    problem = chain(6)
    assert best_bound(problem, trivial_floor(problem) - 1, 5.0) == (0, True)


def test_bound_of_a_chain_is_close() -> None:
    problem = transformer(4)
    budget = simulate(problem, keep_all(problem)).peak // 2
    solution = run_solver(AUTO, problem, budget, time_limit_s=6)
    assert solution.schedule is not None
    assert solution.bound is not None
    base = simulate(problem, keep_all(problem)).cost
    cost = simulate(problem, solution.schedule).cost
    assert base < solution.bound <= cost <= 1.01 * solution.bound


@settings(max_examples=40)
@given(tiny, shares)
def test_policy_walks_are_valid_and_within_the_budget(problem: Problem, share: float) -> None:
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    order = list(range(len(problem.ops)))
    ops, walks, ended = _native.search_policy(
        problem.native, order, alike_values(problem), [], budget, [0, 1], 30, 10.0, 2
    )
    assert ended == ""
    assert 2 <= walks <= 60
    if ops:
        cost, peak = cost_of(problem, ops)
        optimum = brute_force.cheapest(problem, budget)
        assert peak <= budget
        assert optimum is not None
        assert cost >= optimum.cost


@settings(max_examples=60)
@given(tiny, shares)
def test_auto_is_optimal_on_tiny_problems(problem: Problem, share: float) -> None:
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    if budget < 1 or _native.exact_bits(problem.native) > 64:
        return
    optimum = brute_force.cheapest(problem, budget)
    solution = run_solver(AUTO, problem, budget, time_limit_s=10)
    if optimum is None:
        assert solution.status is Status.INFEASIBLE
        assert solution.smallest is not None
        return
    assert solution.status is Status.OPTIMAL
    assert solution.schedule is not None
    assert simulate(problem, solution.schedule).cost == optimum.cost == solution.bound


@pytest.mark.parametrize(
    ("name", "share", "worst"),
    [("RL1", 0.8, 0.0), ("CM1", 0.9, 0.0003), ("CM1", 0.7, 0.0090), ("CM2", 0.7, 0.0062)],
)
def test_auto_on_public_instances(instances: Path, name: str, share: float, worst: float) -> None:
    problem = read_problem(instances / f"{name}.json")
    base = simulate(problem, keep_all(problem))
    solution = run_solver(AUTO, problem, int(share * base.peak), time_limit_s=8)
    assert solution.schedule is not None
    assert simulate(problem, solution.schedule).cost / base.cost - 1 <= worst + 5e-5
    assert solution.bound is not None
    assert base.cost <= solution.bound


def test_auto_answers_a_budget_out_of_reach_with_a_number() -> None:
    problem = chain(12)
    solution = run_solver(AUTO, problem, trivial_floor(problem) - 1, time_limit_s=5)
    assert solution.status is Status.INFEASIBLE
    assert "proven" in solution.message
    assert solution.smallest is not None
    smallest = simulate(problem, solution.smallest).peak
    assert trivial_floor(problem) <= smallest < simulate(problem, keep_all(problem)).peak


def test_auto_is_deterministic_when_no_clock_ends_it() -> None:
    problem = chain(8)
    budget = simulate(problem, keep_all(problem)).peak // 2
    solutions = [run_solver(AUTO, problem, budget, time_limit_s=60, seed=3) for _ in range(2)]
    assert {s.stopped_by for s in solutions} <= {"no improvement", "proof"}
    assert solutions[0].schedule == solutions[1].schedule


@settings(max_examples=25)
@given(tiny)
def test_smallest_peak_of_tiny_problems(problem: Problem) -> None:
    found = simulate(problem, min_budget(problem, 2.0)).peak
    optimum = brute_force.smallest_peak(problem).peak
    assert optimum <= found <= simulate(problem, keep_all(problem)).peak


def test_pareto_falls_and_each_point_is_what_it_says() -> None:
    problem = transformer(2)
    curve = pareto(problem, num_points=6, time_limit_s=8)
    base = simulate(problem, keep_all(problem))
    assert len(curve) >= 4
    assert (curve[-1].peak, curve[-1].cost) == (base.peak, base.cost)
    for point in curve:
        trace = simulate(problem, point.schedule)
        assert (trace.peak, trace.cost) == (point.peak, point.cost)
        assert point.bound is None or point.bound <= point.cost
    for smaller, larger in itertools.pairwise(curve):
        assert smaller.peak < larger.peak
        assert smaller.cost > larger.cost


def test_envelope_drops_what_is_beaten() -> None:
    some = Schedule(())
    points = [Point(p, c, some) for p, c in [(5, 5), (3, 9), (4, 9), (5, 4), (8, 1), (9, 1)]]
    assert [(p.peak, p.cost) for p in envelope(points)] == [(3, 9), (5, 4), (8, 1)]


def test_a_curve_of_one_point_is_refused() -> None:
    with pytest.raises(ValueError, match="two points or more"):
        pareto(chain(3), num_points=1)


def test_sizes_whose_sums_would_not_be_exact_are_refused() -> None:
    problem = chain(4)
    values = tuple(replace(value, size=2**57 + value.size) for value in problem.values)
    large = replace(problem, values=values)
    with pytest.raises(SolverRefused, match="larger size unit"):
        run_solver(AUTO, large, 2**58)


def test_a_schedule_for_more_memory_is_mended() -> None:
    """In a tenth of the time, at hardly any cost."""
    problem = transformer(24)
    budget = int(0.3 * simulate(problem, keep_all(problem)).peak)
    more = run_solver(AUTO, problem, budget, time_limit_s=4.0)
    assert more.schedule is not None
    less = int(0.97 * budget)
    assert simulate(problem, more.schedule).peak > less
    mended = run_solver(AUTO, problem, less, time_limit_s=0.4, warm_start=more.schedule)
    assert mended.schedule is not None
    trace = simulate(problem, mended.schedule)
    assert trace.peak <= less
    assert trace.cost <= 1.03 * simulate(problem, more.schedule).cost


@pytest.mark.parametrize("share", [0.5, 0.35, 0.25])
def test_down_from_a_larger_budget(share: float) -> None:
    """Alone it comes near to what all of them find together."""
    problem = transformer(24)
    base = simulate(problem, keep_all(problem))
    budget = int(share * base.peak)
    search = _Search(problem, budget, time.monotonic() + 20.0, 0, Auto(threads=2))
    search._descend()
    assert search.best is not None
    cost, peak, schedule = search.best
    assert (cost, peak) == cost_of(problem, list(schedule.ops))
    assert peak <= budget
    best = run_solver(AUTO, problem, budget, time_limit_s=4.0)
    assert best.schedule is not None
    assert cost - base.cost <= 1.15 * (simulate(problem, best.schedule).cost - base.cost)
