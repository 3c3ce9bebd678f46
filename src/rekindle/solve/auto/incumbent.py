"""The best schedule so far, which all methods of `auto` share, and one call for each of them.

Whatever a method finds is simulated before it is used, and noted under its name.
"""

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rekindle import _native
from rekindle.core import Problem, Schedule, simulate
from rekindle.solve.anneal.fastsa import LARGE
from rekindle.solve.auto.rounds import Round
from rekindle.solve.auto.start_order import Order, order_for
from rekindle.solve.progress import Progress, report


class Effort(Protocol):
    """How much is tried."""

    @property
    def effort(self) -> float: ...  # scales tries and moves
    @property
    def gap(self) -> float: ...  # of the keep-all cost: closer to the bound is good enough
    @property
    def threads(self) -> int: ...  # 0: all cores


@dataclass
class Incumbent:
    """What one run has found, and what it knows about the optimum."""

    problem: Problem
    budget: int
    deadline: float
    seed: int
    options: Effort
    stopped_by: str = ""
    bound: int = 0
    infeasible: bool = False
    moment: int | None = None  # whose first run gave the bound
    best: tuple[int, int, Schedule] | None = None  # cost, peak
    smallest: tuple[int, int, Schedule] | None = None  # peak, cost
    credits: dict[str, tuple[int, int]] = field(default_factory=dict)
    start: float = field(default_factory=time.monotonic)
    quiet: bool = False  # what it finds is for another, and no progress

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    @property
    def threads(self) -> int:
        return self.options.threads or len(os.sched_getaffinity(0))

    @property
    def base_cost(self) -> int:
        return sum(op.cost for op in self.problem.ops)

    @functools.cached_property
    def order(self) -> Order:
        """What policies and save sets begin from."""
        return order_for(self.problem, self.budget, 0.05 * self.left_s)

    @property
    def for_annealing(self) -> bool:
        """No loss splits it in two, and annealing gets far: little else is worth much time."""
        return self.problem.loss_op is None and len(self.problem.ops) <= LARGE

    def offer(self, ops: Sequence[int], method: str) -> bool:
        """Believes a schedule after simulating it; True if it is the new best."""
        schedule = Schedule(tuple(ops))
        trace = simulate(self.problem, schedule)
        if self.smallest is None or (trace.peak, trace.cost) < self.smallest[:2]:
            self.smallest = (trace.peak, trace.cost, schedule)
        if trace.peak > self.budget:
            return False
        if self.best is not None and (trace.cost, trace.peak) >= self.best[:2]:
            return False
        better = self.best is None or trace.cost < self.best[0]
        self.best = (trace.cost, trace.peak, schedule)
        if better:
            self.credits[method] = (trace.cost, trace.peak)
            if not self.quiet:
                elapsed = time.monotonic() - self.start
                report(Progress("auto", elapsed, cost=trace.cost, bound=self.bound, text=method))
        return better

    def _take(self, found: Sequence[Sequence[int]], method: str, ended: str) -> None:
        for ops in found:
            self.offer(ops, method)
        if ended == "interrupt":
            raise KeyboardInterrupt

    @property
    def done(self) -> bool:
        if self.infeasible:
            return True
        if self.best is None:
            return False
        return self.best[0] - self.bound <= self.options.gap * self.base_cost

    def policies(self) -> None:
        """A first schedule by the greedy walk, then a short climb over its policies."""
        problem = self.problem
        order = self.order.ops
        seeds = [self.seed * 1000 + k for k in range(self.threads)]
        # A short look where other methods will get much further.
        share = 0.01 if self.order.tightest is not None else 0.03 if self.for_annealing else 0.05
        max_walks = max(8, int(self.options.effort * min(2000, 400_000 // (len(problem.ops) + 1))))
        ops, _, ended = _native.search_policy(
            problem.native, order, alike_values(problem), [], self.budget, seeds, max_walks,
            share * self.left_s, self.threads,
        )  # fmt: skip
        self._take([ops] if ops else [], "eviction policies", ended)

    def save_sets(
        self, moment: int, num_seeds: int, tries: int, time_limit_s: float
    ) -> list[list[int]]:
        found, _, ended = _native.search_save_sets(
            self.problem.native, self.order.ops, moment, alike_values(self.problem), self.budget,
            [self.seed * 1000 + 500 + k for k in range(num_seeds)],
            max(20, int(tries * self.options.effort)), time_limit_s, self.threads,
        )  # fmt: skip
        self._take(found, "save sets", ended)
        return found

    def anneal(
        self,
        starts: list[list[int]],
        kind: Round,
        hot: float,
        first_seed: int,
        moves: int,
        time_limit_s: float,
    ) -> list[_native.AnnealResult]:
        results, ended = _native.anneal(
            self.problem.native, starts, int(kind.limit * self.budget), _native.Objective.area,
            [first_seed + k for k in range(len(starts))],
            moves, time_limit_s, self.threads, hot=hot, ratchet=kind.ratchet, windows=kind.windows,
        )  # fmt: skip
        self._take([r.best or r.smallest for r in results], "annealing", ended)
        return list(results)

    def lns(
        self,
        starts: list[list[int]],
        round_: int,
        tries: int,
        time_limit_s: float,
        hot: float = 0.0,
    ) -> list[list[int]]:
        """From each start, with parts of the others; the cheapest first."""
        num_seeds = max(self.threads, len(starts))
        found, _, ended = _native.large_neighbourhood_search(
            self.problem.native, starts, self.budget,
            [self.seed * 10_000 + 100 * (round_ + 1) + k for k in range(num_seeds)],
            tries, time_limit_s, self.threads, hot,
        )  # fmt: skip
        self._take(found, "rebuilding", ended)
        return sorted(found, key=lambda ops: sum(self.problem.ops[i].cost for i in ops))


def alike_values(problem: Problem) -> list[int]:
    """A class for each value: what has the same size, producer and number of readers is alike."""
    classes: dict[tuple[object, ...], int] = {}
    result = []
    for v, value in enumerate(problem.values):
        by = problem.producer[v]
        key: tuple[object, ...] = (value.size, len(problem.readers[v]))
        if by >= 0:
            op = problem.ops[by]
            key += (op.name.partition("#")[0], op.cost, op.outputs.index(v))
        result.append(classes.setdefault(key, len(classes)))
    return result
