"""Transfers put into op sequences, and the search over both."""

from dataclasses import dataclass, field, replace
from random import Random
from typing import ClassVar

import numpy as np
import pytest
from support.random_transfers import random_link

from rekindle.core import HostLink, Problem, Schedule, Status, keep_all, simulate
from rekindle.core.generate import chain, random_problem, random_schedule, transformer
from rekindle.solve import find_solver
from rekindle.solve.base import best_solution, run_solver, trivial_floor
from rekindle.solve.transfers import with_transfers
from rekindle.solve.transfers.bound import relief, transfer_bound
from rekindle.solve.transfers.fit import fit
from rekindle.solve.transfers.gaps import sequence_of
from rekindle.solve.transfers.lane import IdleTime, durations, queued


def linked(problem: Problem, share: float, **options) -> Problem:
    """With a link that carries this share of the keep-all peak while half of the ops run."""
    base = simulate(problem, keep_all(problem))
    rate = max(1, int(share * base.peak * 2 * 10**9 / base.cost))
    link = HostLink(rate, rate, latency=0, least=1, **options)
    return replace(problem, transfers=link)


def solved(problem: Problem, budget: int, time_limit_s: float = 2.0):
    """The solution of recomputation alone, and the one that may move values."""
    solver = find_solver("auto")
    alone = run_solver(solver, problem, budget, time_limit_s=time_limit_s)
    return alone, with_transfers(solver, problem, budget, alone, time_limit_s=time_limit_s)


def test_fitted_sequences_keep_the_budget():
    """Of everything that the format allows: valid, and within the budget, or no answer."""
    fitted = 0
    for seed in range(1500):
        rng = Random(seed)
        problem = random_problem(rng, rng.randint(2, 30), inplace=rng.random(), loss=rng.random())
        problem = replace(problem, transfers=random_link(rng, 200))
        ops = random_schedule(problem, rng, repeats=0.5 * rng.random()).ops
        budget = int(simulate(problem, Schedule(ops)).peak * rng.uniform(0.4, 1))
        schedule = fit(sequence_of(problem, ops), budget)
        if schedule is not None:
            assert schedule.ops == ops
            assert simulate(problem, schedule).peak <= budget
            fitted += bool(schedule.transfers)
    assert fitted > 300


def test_what_fits_is_left_as_it_is():
    problem = linked(transformer(2), 0.2)
    plain = keep_all(problem)
    assert fit(sequence_of(problem, plain.ops), simulate(problem, plain).peak) == plain


@pytest.mark.parametrize("problem", [transformer(4), chain(24)], ids=lambda p: p.name)
def test_a_fast_link_costs_nothing(problem):
    problem = linked(problem, 3.0)
    base = simulate(problem, keep_all(problem))
    _, found = solved(problem, int(0.7 * base.peak))
    trace = simulate(problem, found.schedule)
    assert trace.peak <= 0.7 * base.peak
    assert (trace.cost, found.status, found.stopped_by) == (base.cost, Status.OPTIMAL, "proof")
    assert trace.host_peak >= 0.3 * base.peak


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("fraction", [0.4, 0.6])
def test_never_worse_than_recomputation(share, fraction):
    problem = linked(transformer(4), share)
    budget = int(fraction * simulate(problem, keep_all(problem)).peak)
    alone, found = solved(problem, budget, time_limit_s=1.0)
    trace = simulate(problem, found.schedule)
    assert trace.peak <= budget
    assert found.bound <= trace.cost <= simulate(problem, alone.schedule).cost
    if share >= 0.1:
        assert trace.cost < simulate(problem, alone.schedule).cost


def test_the_host_budget_is_kept():
    free = linked(transformer(4), 1.0)
    budget = int(0.6 * simulate(free, keep_all(free)).peak)
    peak = simulate(free, fit(sequence_of(free, keep_all(free).ops), budget)).host_peak
    for share in (0.0, 0.3, 0.8):
        tight = replace(free, transfers=replace(free.transfers, host_budget=int(share * peak)))
        _, found = solved(tight, budget, time_limit_s=0.5)
        trace = simulate(tight, found.schedule)
        assert trace.host_peak <= share * peak
        assert trace.peak <= budget


def test_below_what_recomputation_reaches():
    """Values that no op may make again can still be moved."""
    problem = transformer(3)
    once = tuple(replace(op, recomputable=False) for op in problem.ops)
    problem = linked(replace(problem, ops=once), 0.5)
    budget = int(0.8 * simulate(problem, keep_all(problem)).peak)
    alone, found = solved(problem, budget, time_limit_s=1.0)
    assert alone.schedule is None
    assert found.status.has_schedule
    assert simulate(problem, found.schedule).peak <= budget


def test_the_bound_knows_the_link():
    """Above what nothing can undercut, below what is found, and the lower the faster the link."""
    base = simulate(transformer(4), keep_all(transformer(4)))
    budget = int(0.4 * base.peak)
    bounds = []
    for share in (0.001, 0.1, 0.3, 3.0):
        problem = linked(transformer(4), share)
        _, found = solved(problem, budget)
        cost = simulate(problem, found.schedule).cost
        assert base.cost <= found.bound <= cost
        bounds.append(transfer_bound(problem, budget, cost, 2.0))
    assert bounds[0] > bounds[1] > bounds[2] >= bounds[3] == base.cost
    assert bounds[0] > 1.01 * base.cost


def test_what_the_link_can_bring_back():
    link = HostLink(2 * 10**9, 10**9, 0, 0)
    assert relief(link, 300, 60) == 200  # 200 bytes in 100 ns, and back in 200
    assert relief(link, 301, 60) == 201
    assert relief(replace(link, serial=True), 300, 60) == 160  # in 80 ns, and back in 160
    assert relief(replace(link, host_budget=7), 300, 60) == 7


def test_what_neither_way_can_do_is_said():
    problem = linked(transformer(4), 1.0)
    floor = trivial_floor(problem)
    alone, found = solved(problem, floor - 1, time_limit_s=0.3)
    assert (found.status, found.schedule) == (Status.INFEASIBLE, None)
    assert found.message == alone.message
    assert "proven" in found.message
    no_room = replace(problem, transfers=replace(problem.transfers, host_budget=0))
    alone, found = solved(no_room, floor, time_limit_s=0.3)
    if alone.schedule is None:
        assert found.message.endswith("with values moved to the host or without")


@dataclass(frozen=True)
class Interrupted:
    """Answers with keep-all, as one that is interrupted in its second solve."""

    calls: list[int] = field(default_factory=list)

    name: ClassVar[str] = "interrupted"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem):
        return None

    def solve(self, problem, budget, *, time_limit_s, seed, warm_start=None):
        self.calls.append(budget)
        if len(self.calls) > 1:
            raise KeyboardInterrupt
        return best_solution(problem, budget, [keep_all(problem).ops], solver=self.name)


def test_an_interrupt_gives_the_best_so_far():
    problem = linked(transformer(4), 0.3)
    budget = int(0.5 * simulate(problem, keep_all(problem)).peak)
    alone, _ = solved(problem, budget, time_limit_s=0.5)
    solver = Interrupted()
    found = with_transfers(solver, problem, budget, alone, time_limit_s=60)
    assert (found.stopped_by, len(solver.calls)) == ("interrupt", 2)
    assert simulate(problem, found.schedule).peak <= budget
    # Interrupted before: no further search.
    told = replace(alone, stopped_by="interrupt")
    found = with_transfers(solver, problem, budget, told, time_limit_s=60)
    assert (found.stopped_by, len(solver.calls)) == ("interrupt", 2)
    assert simulate(problem, found.schedule).cost <= simulate(problem, alone.schedule).cost


def test_numbers_too_large_are_left_alone():
    problem = replace(chain(4), transfers=HostLink(1, 1, 2**61, 0))
    alone, found = solved(problem, simulate(problem, keep_all(problem)).peak)
    assert found.schedule == alone.schedule
    assert "too large" in found.notes[-1]


def test_lanes():
    assert durations(HostLink(10**9, 10**9, 5, 0), np.array([0, 3]), 2 * 10**9).tolist() == [5, 7]
    ready, lengths = np.array([0, 5, 6]), np.array([3, 4, 2])
    ends = queued(ready, lengths)
    assert ends.tolist() == [3, 9, 11]
    idle = IdleTime(ends - lengths, ends, 20)  # free from 3 to 5 and from 11 on
    asked = np.array([0, 0, 4, 10, 19]), np.array([2, 3, 1, 4, 3])
    assert idle.done(*asked).tolist() == [5, 12, 5, 15, 22]
    assert IdleTime(ends[:0], ends[:0], 9).done(np.array([4]), np.array([2])).tolist() == [6]
