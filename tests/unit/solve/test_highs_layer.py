"""The layer over HiGHS: models, growing relaxations, starts, limits, interrupts."""

import itertools
import random
import threading

import numpy as np
import pytest

from rekindle.solve.backends import highs, mip
from rekindle.solve.backends.highs import GrowingLP
from rekindle.solve.backends.mip import INF, Model, Outcome, solve_mip


def knapsack(seed: int, num_items: int) -> tuple[Model, list[int], list[int], int]:
    """Leave out what is worth least so that the rest fits."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 30) for _ in range(num_items)]
    worth = [rng.randint(1, 30) for _ in range(num_items)]
    limit = sum(sizes) // 2
    model = Model()
    left_out = [model.add_column(w, integer=True) for w in worth]
    model.add_row(sum(sizes) - limit, INF, left_out, sizes)
    return model, sizes, worth, limit


def hard_model(seed: int = 0) -> Model:
    """Equal subset sums: no bound to speak of for a long time."""
    rng = random.Random(seed)
    model = Model()
    columns = [model.add_column(rng.randint(10**5, 10**6), integer=True) for _ in range(60)]
    for _ in range(6):
        sizes = [rng.randint(10**4, 10**5) for _ in columns]
        model.add_row(sum(sizes) // 2, sum(sizes) // 2 + 20, columns, sizes)
    return model


@pytest.mark.parametrize("seed", range(5))
def test_knapsack_by_enumeration(seed):
    model, sizes, worth, limit = knapsack(seed, 8)
    best = min(
        sum(w for w, out in zip(worth, choice, strict=True) if out)
        for choice in itertools.product((0, 1), repeat=8)
        if sum(s for s, out in zip(sizes, choice, strict=True) if not out) <= limit
    )
    answer = solve_mip(model, time_limit_s=30)
    assert answer.outcome is Outcome.OPTIMAL
    assert answer.objective == pytest.approx(best)
    assert answer.bound == pytest.approx(best)


def test_rows_added_to_a_relaxation_only_raise_it():
    model = Model()
    x = [model.add_column(c) for c in (1.0, 2.0, 3.0)]
    model.add_row(1.0, INF, x, (1.0, 1.0, 1.0))
    lp = GrowingLP(model)
    first = lp.solve(10)
    lp.add_row(-INF, 0.25, np.array([0], dtype=np.int32), np.array([1.0]))
    second = lp.solve(10)
    lp.add_row(4.0, INF, np.array(x, dtype=np.int32), np.ones(3))
    third = lp.solve(10)
    assert first.objective == pytest.approx(1.0)
    assert second.objective == pytest.approx(0.25 + 2 * 0.75)
    assert third.outcome is Outcome.INFEASIBLE


def test_reduced_costs_bound_the_price_of_a_column():
    model = Model()
    cheap, dear = model.add_column(1.0), model.add_column(5.0)
    model.add_row(1.0, INF, (cheap, dear), (1.0, 1.0))
    answer = GrowingLP(model).solve(10)
    assert answer.reduced_costs[dear] == pytest.approx(4.0)


def test_infeasible():
    model = Model()
    x = model.add_column(integer=True)
    model.add_row(0.4, 0.6, (x,), (1.0,))
    answer = solve_mip(model, time_limit_s=10)
    assert answer.outcome is Outcome.INFEASIBLE
    assert answer.bound == INF


def test_a_start_is_taken():
    model, *_ = knapsack(1, 30)
    news = []
    start = dict.fromkeys(range(30), 1.0)  # leave everything out: feasible and dear
    solve_mip(
        model,
        time_limit_s=30,
        start=start,
        on_progress=lambda objective, *_: news.append(objective),
    )
    assert news[0] <= sum(model.cost)


def test_news_come_in_the_callers_thread_and_improve():
    model, *_ = knapsack(2, 40)
    heard = []

    def hear(objective, bound, x):
        assert threading.current_thread() is threading.main_thread()
        heard.append((objective, bound, x))

    answer = solve_mip(model, time_limit_s=30, on_progress=hear)
    objectives = [objective for objective, _, _ in heard]
    assert objectives == sorted(objectives, reverse=True)
    assert any(x is not None for _, _, x in heard)
    assert objectives[-1] == pytest.approx(answer.objective)


# A search that hears neither its limit nor an interrupt goes on until pytest ends it.
@pytest.mark.timeout(120)
def test_time_limit_is_kept():
    answer = solve_mip(hard_model(), time_limit_s=1.0)
    assert answer.outcome is Outcome.STOPPED


class Ticks:
    """A clock that goes on by what a poll waits, whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.05
        return self.now_s


class Deaf:
    """Stands in for HiGHS where it looks at its limit seconds late."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.cbSimplexInterrupt = self.cbIpmInterrupt = self.cbMipInterrupt = self

    def subscribe(self, callback) -> None:
        """Never calls back."""

    def run(self) -> None:
        self.released.wait(60.0)

    def resetGlobalScheduler(self, blocking: bool) -> None:
        """Has no workers."""


def test_a_solve_that_does_not_hear_is_left_alone(monkeypatch):
    ticks, solver = Ticks(), Deaf()
    monkeypatch.setattr(highs.time, "monotonic", ticks)
    monkeypatch.setattr(highs, "_left_alone", [])
    stop = threading.Event()
    assert highs._run(solver, lambda: None, stop, 1.0) is None
    assert stop.is_set()
    assert 1.0 + highs._GRACE_S < ticks.now_s < 1.0 + highs._GRACE_S + 0.2
    (ended,) = highs._left_alone
    assert not ended.is_set()
    solver.released.set()
    assert ended.wait(60.0)


@pytest.mark.timeout(120)
def test_enough_ends_the_search():
    answer = solve_mip(hard_model(), time_limit_s=3600, enough=lambda objective, bound: bound > 0)
    assert answer.outcome is Outcome.STOPPED
    assert answer.bound > 0
    assert not answer.interrupted


@pytest.mark.timeout(120)
def test_ctrl_c_returns_what_there_is(ctrl_c_after):
    ctrl_c_after(0.7)
    answer = solve_mip(hard_model(), time_limit_s=3600)
    assert answer.interrupted


def test_gurobi_is_not_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(mip.importlib.util, "find_spec", lambda name: None)
    model, *_ = knapsack(3, 8)
    assert solve_mip(model, time_limit_s=10).outcome is Outcome.OPTIMAL
