"""`fastsa` and `reorder`: quality, determinism, options, limits and corner cases."""

import subprocess
import sys
import textwrap

import pytest
from support import brute_force
from support.clocks import JumpingClock

from rekindle import _native
from rekindle.core import Op, Problem, Status, Value, keep_all, read_problem, simulate
from rekindle.core.generate import random_layered, random_problem, random_schedule, transformer
from rekindle.errors import SolverRefused
from rekindle.solve import listen, run_solver
from rekindle.solve.anneal.fastsa import FastSA, Reorder, default_moves
from rekindle.solve.base import trivial_floor, without_dead_ops

# Cost increase in per cent at 90, 80 and 70 % of keep-all: FastSA's paper, Table 1, + 0.1 points.
# Where the paper is over budget: RL1 2.2 (77.3 %) and RL3 4.8 (73.5 %) at 70 %, what we reach.
PAPER = {
    "RL1": (0.1, 0.4, 2.3),
    "RL2": (0.1, 0.1, 2.7),
    "RL3": (0.13, 2.4, 6.5),
    "RL4": (0.5, 2.6, 7.5),
    "CM1": (0.2, 0.2, 3.1),
    "CM2": (0.3, 0.5, 0.9),
}
FAST = {("RL1", 90), ("RL1", 80), ("RL2", 90), ("CM1", 80), ("CM1", 70), ("CM2", 70)}


def overhead(problem, solution):
    return 100 * (simulate(problem, solution.schedule).cost / keep_cost(problem) - 1)


def keep_cost(problem):
    return simulate(problem, keep_all(problem)).cost


def keep_peak(problem):
    return simulate(problem, keep_all(problem)).peak


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        pytest.param(n, b, marks=() if (n, b) in FAST else pytest.mark.slow)
        for n in PAPER
        for b in (90, 80, 70)
    ],
)
def test_not_worse_than_the_paper(name, percent, instances):
    problem = read_problem(instances / f"{name}.json")
    budget = keep_peak(problem) * percent // 100
    solver = FastSA(num_moves=600_000) if (name, percent) in FAST else FastSA()
    solution = run_solver(solver, problem, budget)
    assert solution.status.has_schedule
    assert overhead(problem, solution) <= PAPER[name][(90 - percent) // 10]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "peak"), [("RL1", 36_790), ("RL2", 105_170)])
def test_order_alone_reaches_the_papers_peaks(name, peak, seed, instances):
    """79.4 % (to the digit, 79.427) and 71.6 % of keep-all; the paper's are 79.4 and 72.2 %."""
    problem = read_problem(instances / f"{name}.json")
    solution = run_solver(Reorder(), problem, peak, seed=seed)
    assert solution.status is Status.OPTIMAL
    assert simulate(problem, solution.schedule).runs == (1,) * len(problem.ops)


def test_no_order_of_rl1_is_smaller(instances):
    """36790 is the least that any order needs: a byte less is proven out of reach."""
    solution = run_solver(Reorder(), read_problem(instances / "RL1.json"), 36_789)
    assert solution.status is Status.INFEASIBLE
    assert solution.message.startswith("proven over orders without recomputation: ")


def test_more_rounds_where_the_first_finds_nothing():
    """The first round's moves are too few here for any schedule within the budget."""
    problem = random_layered(40, seed=1)
    budget = int(0.9 * keep_peak(problem))
    first = run_solver(FastSA(num_moves=default_moves(problem)), problem, budget)
    assert (first.status, first.stopped_by) == (Status.TIME_LIMIT, "move limit")
    solution = run_solver(FastSA(), problem, budget, time_limit_s=600)
    plain = sum(op.cost for op in problem.ops)
    assert simulate(problem, solution.schedule).cost <= 1.2146 * plain
    assert simulate(problem, solution.schedule).peak <= budget
    assert solution.stopped_by == "move limit"


def test_tiny_problems_against_brute_force():
    """The optimum over all schedules, but for a rare trap at the very smallest budget."""
    missed = 0
    for seed in range(40):
        problem, _ = without_dead_ops(random_problem(seed, 7, dead=0.0, inplace=0.4))
        smallest = brute_force.smallest_peak(problem).peak
        for budget in sorted({smallest, (smallest + keep_peak(problem)) // 2}):
            solution = run_solver(FastSA(num_moves=40_000), problem, budget)
            best = brute_force.cheapest(problem, budget)
            if solution.schedule is None:
                assert budget == smallest
                missed += 1
            else:
                cost = simulate(problem, solution.schedule).cost
                assert cost >= best.cost
                missed += cost > best.cost
        solution = run_solver(FastSA(num_moves=2_000), problem, smallest - 1)
        proven = smallest - 1 < trivial_floor(problem)
        assert solution.status is (Status.INFEASIBLE if proven else Status.TIME_LIMIT)
        assert simulate(problem, solution.smallest).peak >= smallest
    assert missed <= 1


@pytest.mark.parametrize("solver", [FastSA(num_moves=40_000), Reorder(num_moves=40_000)])
def test_same_seed_same_schedule(solver):
    problem = random_problem(11, 60, max_size=1000)
    budget = keep_peak(problem) * 8 // 10
    first = run_solver(solver, problem, budget, seed=3)
    again = run_solver(solver, problem, budget, seed=3)
    assert (first.schedule, first.smallest) == (again.schedule, again.smallest)


def test_threads_do_not_change_the_answer():
    problem = transformer(4)
    budget = keep_peak(problem) // 2
    one = run_solver(FastSA(num_moves=80_000, num_threads=1), problem, budget)
    three = run_solver(FastSA(num_moves=80_000, num_threads=3), problem, budget)
    assert one.schedule == three.schedule


def test_native_search_is_deterministic_for_a_move_limit():
    problem = transformer(4)
    budget = keep_peak(problem) // 2
    start = list(keep_all(problem).ops)

    def once():
        results, ended = _native.anneal(
            problem.native, [start], budget, _native.Objective.area, [1, 2], 30_000, 1e9, 2
        )
        assert ended == ""
        return [(r.best, r.smallest, r.accepted) for r in results]

    assert once() == once()


@pytest.mark.parametrize("objective", ["area", "product", "elu", "peak"])
@pytest.mark.parametrize("moves", ["directed", "paper"])
@pytest.mark.parametrize("grouping", [False, True])
def test_every_objective(objective, moves, grouping):
    problem = transformer(3)
    budget = keep_peak(problem) * 7 // 10
    solver = FastSA(objective=objective, moves=moves, grouping=grouping, num_moves=220_000)
    solution = run_solver(solver, problem, budget)
    found = solution.schedule or solution.smallest
    assert simulate(problem, found).peak <= 0.8 * keep_peak(problem)


def test_the_published_settings_meet_an_easy_budget():
    problem = transformer(2)
    solution = run_solver(FastSA.as_published(), problem, keep_peak(problem) * 8 // 10)
    assert solution.status.has_schedule


def test_log_add_exp():
    problem = transformer(3)
    budget = keep_peak(problem) * 7 // 10
    solver = FastSA(objective="product", smooth=True, num_moves=100_000)
    solution = run_solver(solver, problem, budget)
    found = solution.schedule or solution.smallest
    assert simulate(problem, found).peak <= 0.8 * keep_peak(problem)


def test_own_objective():
    """A function of (peak, cost): here it wants the smallest peak at any cost."""
    problem = transformer(2)
    solver = FastSA(objective=lambda peak, cost: peak, num_moves=60_000)
    solution = run_solver(solver, problem, 1)
    assert solution.status is Status.INFEASIBLE
    assert simulate(problem, solution.smallest).peak < 0.7 * keep_peak(problem)


def test_warm_start_is_never_made_worse():
    problem = transformer(4)
    budget = keep_peak(problem) * 45 // 100
    first = run_solver(FastSA(num_moves=200_000), problem, budget)
    cost = simulate(problem, first.schedule).cost
    again = run_solver(FastSA(num_moves=1_000), problem, budget, seed=5, warm_start=first.schedule)
    assert simulate(problem, again.schedule).cost <= cost


def test_native_search_refuses_an_invalid_start():
    problem = transformer(1)
    with pytest.raises(ValueError, match="not a valid schedule"):
        _native.anneal(problem.native, [[1]], 1, _native.Objective.area, [0], 10, 1.0)


def test_loss_and_run_once_ops_stand_once():
    problem = transformer(3, dropout=True)
    budget = keep_peak(problem) * 6 // 10
    solution = run_solver(FastSA(num_moves=200_000), problem, budget)
    runs = simulate(problem, solution.schedule).runs
    assert all(runs[i] == 1 for i, op in enumerate(problem.ops) if op.once)
    assert max(runs) > 1


@pytest.mark.timeout(120)  # its moves would take it an hour
def test_time_limit_is_kept(monkeypatch):
    problem = transformer(12)
    solver = FastSA(num_moves=10**10)
    with JumpingClock(monkeypatch, 0.5, 1000) as clock:  # real time: each stage is cut short
        solution = run_solver(solver, problem, keep_peak(problem) // 2, time_limit_s=0.5)
    clock.assert_kept(len(problem.ops))
    assert solution.stopped_by == "time limit"
    assert solution.status.has_schedule or solution.smallest is not None


def test_progress_is_told():
    heard = []
    problem = transformer(3)
    with listen(heard.append):
        run_solver(FastSA(num_moves=50_000), problem, keep_peak(problem) * 7 // 10)
    assert heard
    assert heard[-1].solver == "fastsa"
    costs = [p.cost for p in heard if p.cost is not None]
    assert costs == sorted(costs, reverse=True)


def single(size=5, workspace=2):
    op = Op("op", 3, (), (0,), workspace=workspace)
    return Problem(values=(Value("v", size),), ops=(op,), outputs=(0,))


@pytest.mark.parametrize("solver", [FastSA(), Reorder()])
class TestCorners:
    def test_single_op(self, solver):
        solution = run_solver(solver, single(), 7)
        assert solution.status is Status.OPTIMAL
        assert solution.schedule.ops == (0,)

    def test_budget_below_the_largest_op(self, solver):
        solution = run_solver(solver, single(), 6)
        assert solution.status is Status.INFEASIBLE
        assert solution.message.startswith("proven: ")
        assert "7" in solution.message
        assert solution.smallest.ops == (0,)

    def test_no_ops(self, solver):
        empty = Problem(values=(), ops=())
        assert run_solver(solver, empty, 1).status is Status.OPTIMAL

    def test_all_sizes_zero(self, solver):
        problem = random_problem(1, 30, zeros=1.0, workspace=0.0)
        solution = run_solver(solver, problem, 1)
        assert solution.status is Status.OPTIMAL

    def test_sizes_beyond_exact_sums_are_refused(self, solver):
        with pytest.raises(SolverRefused, match="exact up to 2"):
            run_solver(solver, single(size=2**61), 2**61)


def test_interrupt_returns_the_best_so_far():
    """Ctrl-C in the middle of a native search."""
    script = """
        import os, signal, threading
        from rekindle.core.generate import transformer
        from rekindle.core import keep_all, simulate
        from rekindle.solve import run_solver
        from rekindle.solve.anneal.fastsa import FastSA
        problem = transformer(6)
        budget = simulate(problem, keep_all(problem)).peak * 6 // 10
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        solver = FastSA(num_moves=10**9)
        solution = run_solver(solver, problem, budget, time_limit_s=120)
        print(solution.stopped_by, solution.status.has_schedule)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["interrupt", "True"]


@pytest.mark.slow
def test_fifty_thousand_ops_in_less_than_a_gigabyte():
    script = """
        import resource
        from rekindle.core.generate import chain, random_layered
        from rekindle.core import keep_all, simulate
        from rekindle.solve import run_solver
        from rekindle.solve.anneal.fastsa import FastSA
        for problem in (chain(12_500), random_layered(50_000)):
            assert len(problem.ops) >= 25_000, len(problem.ops)
            budget = simulate(problem, keep_all(problem)).peak * 95 // 100
            solution = run_solver(FastSA(num_threads=2), problem, budget, time_limit_s=10)
            assert solution.schedule is not None or solution.smallest is not None
            print(problem.name, len(problem.ops), solution.status.name, solution.wall_s)
            assert solution.wall_s / 10 < 6  # of the limit
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    assert int(done.stdout.split()[-1]) < 10**6  # kilobytes


def test_random_warm_starts_are_taken():
    problem, _ = without_dead_ops(random_problem(3, 20, dead=0.0))
    for seed in range(5):
        start = random_schedule(problem, seed)
        budget = simulate(problem, start).peak
        solution = run_solver(FastSA(num_moves=4_000), problem, budget, warm_start=start)
        assert solution.status.has_schedule
        assert simulate(problem, solution.schedule).cost <= simulate(problem, start).cost
