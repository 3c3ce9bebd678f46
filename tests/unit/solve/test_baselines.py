from random import Random

import pytest
from support import brute_force

from rekindle import _native
from rekindle.core import (
    Problem,
    Schedule,
    Status,
    check_schedule,
    keep_all,
    read_problem,
    simulate,
)
from rekindle.core.generate import chain, random_problem, random_schedule, transformer, unet
from rekindle.solve import run_solver
from rekindle.solve.baselines import Floor, KeepAll, Sqrt, segmented
from rekindle.solve.min_budget import min_budget

INSTANCES = ("RL1", "RL2", "RL3", "RL4", "CM1", "CM2")


@pytest.mark.parametrize("name", INSTANCES)
def test_keep_all(name, instances):
    problem = read_problem(instances / f"{name}.json")
    peak = simulate(problem, keep_all(problem)).peak
    fits = run_solver(KeepAll(), problem, peak)
    assert (fits.status, fits.schedule) == (Status.OPTIMAL, keep_all(problem))
    short = run_solver(KeepAll(), problem, peak - 1)
    assert (short.status, short.smallest) == (Status.TIME_LIMIT, keep_all(problem))


@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("solver", [Sqrt(), Floor()], ids=lambda s: s.name)
def test_on_public_instances(name, solver, instances):
    """Valid and within the budget or infeasible with a number, at every budget."""
    problem = read_problem(instances / f"{name}.json")
    base = simulate(problem, keep_all(problem))
    for percent in (100, 90, 80, 70, 50):
        budget = base.peak * percent // 100
        solution = run_solver(solver, problem, budget, time_limit_s=10)
        if solution.schedule is not None:
            trace = simulate(problem, solution.schedule)
            assert trace.peak <= budget
            assert trace.cost >= base.cost
        else:
            assert solution.smallest is not None
            assert simulate(problem, solution.smallest).peak > budget
        if percent == 100:
            assert solution.schedule is not None
            assert simulate(problem, solution.schedule).cost == base.cost


def test_floor_reaches_what_one_op_needs_on_cm1(instances):
    """CM1 cannot go below 61.5 % of keep-all: one op with its inputs needs that."""
    problem = read_problem(instances / "CM1.json")
    assert simulate(problem, min_budget(problem)).peak == 8287944704


@pytest.mark.parametrize("num_layers", [9, 16, 64, 100])
def test_sqrt_on_a_uniform_chain(num_layers):
    """Chen et al. 2016: O(sqrt n) memory for at most one more forward."""
    problem = chain(num_layers, uniform=True)
    base = simulate(problem, keep_all(problem))
    solution = run_solver(Sqrt(), problem, -1)
    assert solution.smallest is not None
    trace = simulate(problem, solution.smallest)
    forward = 100 * num_layers
    assert trace.cost <= base.cost + forward
    weight_grads = 10 * num_layers
    assert (trace.peak - weight_grads) / 1000 <= 2 * num_layers**0.5 + 4


@pytest.mark.parametrize("problem", [chain(20, 1), unet(2), transformer(3)], ids=lambda p: p.name)
def test_segments_never_run_an_op_more_than_twice(problem):
    for count in (2, 3, 5, 8):
        trace = simulate(problem, Schedule(tuple(segmented(problem, count))))
        assert max(trace.runs) <= 2


@pytest.mark.parametrize("seed", range(100))
def test_segments_of_anything_are_valid(seed):
    problem = random_problem(seed, 14, once=0.2)
    for count in range(1, 9):
        check_schedule(problem, Schedule(tuple(segmented(problem, count))))


@pytest.mark.parametrize("seed", range(300))
def test_evict_keeps_its_promise(seed):
    """Where the walk says that it fits, the simulated peak is within the limit."""
    rng = Random(seed)
    problem = random_problem(rng, rng.randint(2, 14), once=0.15, loss=0.7, multi_output=0.3)
    order = list(range(len(problem.ops)))
    if seed % 2:
        order = list(random_schedule(problem, rng, repeats=0.0).ops)
    base = simulate(problem, Schedule(tuple(order))).peak
    for limit in range(base + 40):
        fits, ops = _native.evict(problem.native, order, limit, 1000, 10.0)
        if fits:
            assert simulate(problem, Schedule(tuple(ops))).peak <= limit
    # Enough for everything twice, without in-place savings: nothing has to go.
    plenty = 2 * sum(v.size for v in problem.values) + max(op.workspace for op in problem.ops)
    fits, ops = _native.evict(problem.native, order, plenty, 1000, 10.0)
    assert fits
    assert len(ops) == len(set(ops))


@pytest.mark.parametrize("seed", range(60))
def test_floor_is_never_below_the_true_floor(seed):
    problem = random_problem(seed, 6)
    true_floor = brute_force.smallest_peak(problem).peak
    assert true_floor <= simulate(problem, min_budget(problem)).peak


def test_floor_is_often_the_true_floor():
    exact = 0
    for seed in range(60):
        problem = random_problem(seed, 6, inplace=0.0)
        true_floor = brute_force.smallest_peak(problem).peak
        exact += simulate(problem, min_budget(problem)).peak == true_floor
    assert exact >= 30


@pytest.mark.parametrize("seed", range(100))
def test_drop_dead_runs(seed):
    """Never more memory at its peak, never more cost; what is left out was not needed."""
    rng = Random(seed)
    problem = random_problem(rng, 10)
    schedule = random_schedule(problem, rng, repeats=0.5)
    kept = Schedule(tuple(_native.drop_dead_runs(problem.native, list(schedule.ops))))
    before, after = simulate(problem, schedule), simulate(problem, kept)
    assert after.peak <= before.peak
    assert after.cost <= before.cost
    again = _native.drop_dead_runs(problem.native, list(kept.ops))
    assert tuple(again) == kept.ops


@pytest.mark.parametrize("solver", [KeepAll(), Sqrt(), Floor()], ids=lambda s: s.name)
def test_nothing_to_do(solver):
    solution = run_solver(solver, Problem((), ()), 1)
    assert solution.schedule == Schedule(())
