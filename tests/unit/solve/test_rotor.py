"""Rotor's own examples, and the chain solvers on problems."""

import itertools
import math
import time
from dataclasses import replace

import pytest
from support.clocks import JumpingClock

from rekindle.core import Op, Problem, Schedule, Status, Value, generate, keep_all, simulate
from rekindle.errors import SolverRefused
from rekindle.partition.chain import Chain, Stage, chain_of_stages, find_chain
from rekindle.solve import run_solver
from rekindle.solve.chains.chain_dp import (
    Rule,
    Run,
    best_sequence,
    lower_steps,
    segment_steps,
    solve_chain,
)
from rekindle.solve.chains.rotor import Revolve, Rotor, RotorFloating, Sequential

# Table 2: sizes in 0.01 MB, times in 0.01 ms. Where a-bar is printed below a, a counts.
TOY_A = (763, 954, 1068, 1106, 1068, 954, 763)
TOY_BAR = (763, 954, 1068, 1108, 1066, 954, 763)
TOY_BACKWARD_OVERHEAD = (2001, 2764, 3099, 3099, 2764, 1908)
TOY_FORWARD = (160, 220, 244, 251, 210, 143)
TOY_BACKWARD = (305, 448, 509, 493, 421, 334)
SOLVERS = (Rotor(), RotorFloating(), Revolve(), Sequential())


def toy_stages():
    return [
        Stage(
            forward_cost=TOY_FORWARD[k],
            backward_cost=TOY_BACKWARD[k],
            output=TOY_A[k + 1],
            saved=TOY_BAR[k + 1],
            gradient=TOY_A[k + 1],
            backward_overhead=TOY_BACKWARD_OVERHEAD[k],
        )
        for k in range(6)
    ] + [Stage(0, 0, 0, 0, 0)]


def toy_chain():
    return chain_of_stages(toy_stages(), TOY_A[0], TOY_A[0])


def toy_problem():
    """The toy network as a problem: a^0 is made by an op that runs once, so that it counts."""
    sizes = [max(a, bar) for a, bar in zip(TOY_A, TOY_BAR, strict=True)]
    values = [Value(f"a{k}", sizes[k]) for k in range(7)]
    values += [Value(f"d{k}", TOY_A[k]) for k in range(7)]
    forward = [
        Op(f"F{k}", TOY_FORWARD[k - 1], (k - 1,), (k,), phase="forward") for k in range(1, 7)
    ]
    backward = [
        Op(
            f"B{k}",
            TOY_BACKWARD[k - 1],
            (k - 1, k, 7 + k),
            (6 + k,),
            workspace=TOY_BACKWARD_OVERHEAD[k - 1],
            phase="backward",
            grad_of=k,
        )
        for k in range(6, 0, -1)
    ]
    ops = [
        Op("input", 0, (), (0,), recomputable=False, phase="forward"),
        *forward,
        Op("loss", 0, (6,), (13,), phase="loss"),
        *backward,
    ]
    return Problem(tuple(values), tuple(ops), outputs=(7,), name="toy", cost_unit="unit")


def cost_at(budget, rule=Rule.persistent):
    sequence = best_sequence(toy_chain(), budget, rule, slots=budget)
    return math.inf if sequence is None else sequence.cost


def test_toy_without_recomputation():
    assert cost_at(10701) == 3738
    assert cost_at(10700) > 3738
    trace = simulate(toy_problem(), keep_all(toy_problem()))
    assert trace.cost == 3738
    assert trace.peak == 10701  # 107 MB


@pytest.mark.parametrize(
    ("budget", "cost"), [(10000, 4118), (9000, 4742), (8300, 5617), (8212, 5617), (8211, math.inf)]
)
def test_toy_costs(budget, cost):
    assert cost_at(budget) == cost


def test_toy_sequence_of_the_paper():
    sequence = best_sequence(toy_chain(), 9000, slots=9000)
    names = {Run.keep: "ck", Run.drop: "none", Run.save: "all", Run.back: "B"}
    text = " ".join(f"{names[run]}{block + 1}" for run, block, _ in sequence.steps)
    assert text == (
        "ck1 none2 none3 all4 all5 all6 all7 B7 B6 B5 B4 ck1 none2 all3 B3 all1 all2 B2 B1"
    )
    assert sequence.cost == 4742
    assert cost_at(8677) == 4742  # its peak, 86.8 MB
    assert cost_at(8676) > 4742


def test_toy_floating():
    assert cost_at(8600) == 5617
    assert cost_at(8600, Rule.floating) == 5457


def test_toy_lowered_to_ops_is_better_still():
    problem = toy_problem()
    solution = run_solver(Rotor(slots=9000), problem, 9000)
    assert simulate(problem, solution.schedule).cost == 4278
    plain = run_solver(Rotor(slots=9000, prune=False), problem, 9000)
    assert simulate(problem, plain.schedule).cost <= 4742


@pytest.mark.parametrize("n", [5, 6, 9, 20])
def test_counter_example(n):
    """Fig. 4 with k = n - 2: the best persistent sequence costs 3n - 2, the best one 2n + 2."""
    length = n + 2
    sizes = [0, 1, *[3] * (length - 2), 4, 0]
    costs = [n - 2, 2, *[0] * (length - 1)]
    sizes[length] = 4
    stages = [
        Stage(costs[k], 0, sizes[k + 1], sizes[k + 1], sizes[k + 1]) for k in range(length + 1)
    ]
    chain = chain_of_stages(stages, 0, 0)
    assert best_sequence(chain, 15, Rule.persistent).cost == 3 * n - 2
    assert best_sequence(chain, 15, Rule.floating).cost == 2 * n + 2


def test_parameter_gradients_are_charged():
    """The backward leaves 5 of each stage: at the end 5 n are there beside what the last needs."""
    stages = [Stage(1, 1, 4, 4, 4, kept_gradient=5) for _ in range(4)]
    stages.append(Stage(0, 0, 0, 0, 0))
    chain = chain_of_stages(stages, 4, 4)
    # The backward of the first stage: input, saved, both deltas, 3 gradients and its own.
    least = next(b for b in range(100) if best_sequence(chain, b, slots=100) is not None)
    assert least == 4 + 4 + 4 + 4 + 4 * 5
    free = chain_of_stages([replace(s, kept_gradient=0) for s in stages], 4, 4)
    assert best_sequence(free, least - 1, slots=100) is not None


def test_revolve_saves_only_right_before_the_backward():
    steps = best_sequence(toy_chain(), 9000, Rule.revolve, slots=9000).steps
    for (run, block, _), (next_run, next_block, _) in itertools.pairwise(steps):
        if run == Run.save:
            assert (next_run, next_block) == (Run.back, block)


def test_revolve_on_equal_stages_is_binomial():
    """Ten equal stages: Griewank and Walther's number of forward runs, r l - C(s + r, r - 1)."""
    stages = [Stage(1, 0, 1, 1, 0) for _ in range(10)]
    chain = chain_of_stages(stages, 1, 0)
    # Slots: the kept inputs, that of the stage that runs, and its output.
    for kept in (0, 1, 2, 3, 5, 9):
        snapshots = kept + 1
        repeats = next(r for r in range(10) if math.comb(snapshots + r, r) >= 10)
        expected = repeats * 10 - math.comb(snapshots + repeats, repeats - 1) + 10
        program = solve_chain(chain, 1, kept + 2, Rule.revolve)
        assert program.table.cost(kept + 2) == expected


def test_slots_round_to_the_safe_side():
    """With any number of slots the sequence fits the budget by the model's own exact numbers."""
    problem = generate.chain(20, 3)
    chain = find_chain(problem)
    keep = simulate(problem, keep_all(problem)).peak
    for slots in (7, 30, 113, 500):
        for budget in (keep, 9 * keep // 10, 8 * keep // 10):
            sequence = best_sequence(chain, budget, slots=slots)
            if sequence is not None:
                ops = lower_steps(problem, chain, sequence.steps)
                trace = simulate(problem, Schedule(tuple(ops)))
                assert trace.peak <= budget
                assert trace.cost <= sequence.cost


@pytest.mark.parametrize("count", range(1, 8))
def test_segments_run_every_backward_once(count):
    steps = segment_steps(7, count)
    backward = [block for run, block, _ in steps if run == Run.back]
    assert backward == list(range(6, -1, -1))
    kept = [block for run, block, _ in steps if run == Run.keep]
    assert len(kept) == count - 1
    runs = [block for run, block, _ in steps if run in (Run.keep, Run.drop)]
    assert runs == list(range((count - 1) * (7 // count)))


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: s.name)
@pytest.mark.parametrize(
    "problem",
    [generate.chain(15, 2), generate.transformer(3), generate.transformer(2, dropout=True)],
    ids=lambda p: p.name,
)
def test_solvers_keep_the_contract(solver, problem):
    keep = simulate(problem, keep_all(problem))
    costs = []
    for percent in (100, 85, 70):
        budget = keep.peak * percent // 100
        solution = run_solver(solver, problem, budget, time_limit_s=20)
        again = run_solver(solver, problem, budget, time_limit_s=20)
        assert again.schedule == solution.schedule
        if solution.schedule is None:
            assert solution.status is Status.TIME_LIMIT
            assert simulate(problem, solution.smallest).peak > budget
            continue
        trace = simulate(problem, solution.schedule)
        assert trace.peak <= budget
        costs.append(trace.cost)
        assert solution.bound <= trace.cost
    assert costs[0] == keep.cost
    assert costs == sorted(costs)


def test_hopeless_budget_names_the_smallest_peak():
    problem = generate.transformer(2)
    solution = run_solver(Rotor(), problem, 10)
    assert solution.status == Status.INFEASIBLE
    keep = simulate(problem, keep_all(problem)).peak
    assert simulate(problem, solution.smallest).peak < keep


def test_inference_graph_is_refused():
    with pytest.raises(SolverRefused, match="has no phase"):
        run_solver(Rotor(), generate.random_layered(20), 10**6)


@pytest.mark.parametrize("jump_at", [6, 30])
def test_time_limit_is_kept(jump_at, monkeypatch):
    problem = generate.chain(300, 1)
    budget = simulate(problem, keep_all(problem)).peak // 2
    with JumpingClock(monkeypatch, 1.0, jump_at) as clock:
        solution = run_solver(RotorFloating(max_blocks=300), problem, budget, time_limit_s=1.0)
    clock.assert_kept(len(problem.ops))
    assert solution.schedule is not None or solution.smallest is not None


def long_chain(num_stages: int) -> Chain:
    stages = [
        Stage(100 + k % 7, 200, 50 + k % 13, 90 + k % 29, 50 + k % 13)
        for k in range(num_stages - 1)
    ]
    return chain_of_stages([*stages, Stage(0, 0, 0, 0, 0)], 50, 50)


def test_long_chain():
    """339 stages and 500 slots: the paper's longest chain."""
    assert best_sequence(long_chain(339), 338 * 30) is not None


@pytest.mark.slow
def test_a_chain_takes_the_time_of_its_length_cubed():
    seconds = []
    for num_stages in (170, 340):
        chain = long_chain(num_stages)
        start = time.process_time()
        for _ in range(3):
            assert best_sequence(chain, 30 * num_stages) is not None
        seconds.append(time.process_time() - start)
    assert seconds[1] < 16 * seconds[0]  # 8 times the sums, in a table that caches hold less of
