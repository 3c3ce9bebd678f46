"""The layer over HiGHS: models, growing relaxations, starts, limits, interrupts."""

import itertools
import random
import threading
import time

import numpy as np
import pytest

from rekindle.solve.backends import mip
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


def test_time_limit_is_kept():
    start = time.monotonic()
    answer = solve_mip(hard_model(), time_limit_s=1.0)
    assert time.monotonic() - start < 2.1
    assert answer.outcome is Outcome.STOPPED


def test_enough_ends_the_search():
    start = time.monotonic()
    answer = solve_mip(hard_model(), time_limit_s=60, enough=lambda objective, bound: bound > 0)
    assert time.monotonic() - start < 20
    assert answer.outcome is Outcome.STOPPED
    assert answer.bound > 0
    assert not answer.interrupted


def test_ctrl_c_returns_what_there_is(ctrl_c_after):
    ctrl_c_after(0.7)
    start = time.monotonic()
    answer = solve_mip(hard_model(), time_limit_s=60)
    assert answer.interrupted
    assert time.monotonic() - start < 10


def test_gurobi_is_not_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(mip.importlib.util, "find_spec", lambda name: None)
    model, *_ = knapsack(3, 8)
    assert solve_mip(model, time_limit_s=10).outcome is Outcome.OPTIMAL
