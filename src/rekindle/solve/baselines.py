"""The baselines: `keep-all`, `sqrt` and `floor`.

- keep-all: every op once, in the listed order.
- sqrt (Chen et al. 2016, arXiv:1604.06174): the order of the forward ops is cut into segments; of
  a segment only what later segments read is kept; the rest is brought back when the backward asks
  for it. Works on any graph, since it cuts the order and not the graph. Every number of segments
  (up to a few dozen, evenly spread beyond) is tried. `segmented`
- floor: the smallest peak that a greedy walk (`cpp/greedy/evict.h`) reaches as its memory limit
  goes down, in the listed order and in one that is lean on memory, so that a budget that cannot be
  met is answered with a number. `Floor._search_order`

Known limits: none of them proves more than that a schedule which runs every op once is optimal.
sqrt counts bytes to balance segments, not costs, and leaves the rest of the memory unused where the
best number of segments needs less than the budget.
"""

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.solve.base import best_solution, trivial_floor


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Recomputes nothing."""

    name: ClassVar[str] = "keep-all"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return None

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        # Every op that is not dead runs at least once, so their cost is a bound.
        schedule = keep_all(problem)
        cost = sum(op.cost for op in problem.ops)
        return best_solution(problem, budget, [schedule.ops], solver=self.name, bound=cost)


@dataclass(frozen=True, slots=True)
class Sqrt:
    """Equal segments of the forward, of which only the ends are kept."""

    max_trials: int = 48

    name: ClassVar[str] = "sqrt"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return None

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        deadline = time.monotonic() + time_limit_s
        plans: list[Sequence[int]] = [keep_all(problem).ops]
        stopped_by = ""
        try:
            for plan in segmentations(problem, self.max_trials):
                plans.append(plan)
                # Asked after a trial and not before: with no time at all there is still one
                # segmentation.
                if time.monotonic() > deadline:
                    stopped_by = "time limit"
                    break
        except KeyboardInterrupt:
            stopped_by = "interrupt"
        return best_solution(problem, budget, plans, solver=self.name, stopped_by=stopped_by)


@dataclass(frozen=True, slots=True)
class Floor:
    """The smallest peak that a greedy walk reaches, whatever it costs."""

    max_length_factor: int = 40  # a schedule longer than this many times the ops is given up

    name: ClassVar[str] = "floor"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return None

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        found, stopped_by = self._search(problem, budget, time.monotonic() + time_limit_s)
        return best_solution(problem, budget, found, solver=self.name, stopped_by=stopped_by)

    def _search(
        self, problem: Problem, budget: int, deadline: float
    ) -> tuple[list[Sequence[int]], str]:
        """For each order of the ops: the order itself, the walk at the budget and just below it,
        then ever smaller limits."""
        found: list[Sequence[int]] = []
        try:
            for order in _orders(problem, deadline):
                found.append(order)
                self._search_order(problem, order, budget, deadline, found)
        except KeyboardInterrupt:
            return found or [keep_all(problem).ops], "interrupt"
        return found, "time limit" if time.monotonic() >= deadline else ""

    def _search_order(
        self,
        problem: Problem,
        order: list[int],
        budget: int,
        deadline: float,
        found: list[Sequence[int]],
    ) -> None:
        max_steps = self.max_length_factor * len(order) + 1000

        def walk(limit: int) -> int | None:
            left = max(0.0, deadline - time.monotonic())
            # A limit on the length beside that on time: below what an order can do the walk goes
            # round in circles, and a count gives it up at the same place on every machine.
            fits, ops = _native.evict(problem.native, order, limit, max_steps, left)
            if not fits:
                return None
            found.append(ops)
            return simulate(problem, Schedule(tuple(ops))).peak

        low = trivial_floor(problem)
        high = simulate(problem, Schedule(tuple(order))).peak
        if high <= budget:
            return
        if low <= budget and walk(budget) is not None:
            # The walk is not monotone: a little less room may come out cheaper.
            for k in range(1, 5):
                walk(budget - (budget - low) * k // 32)
        # Downwards in steps, not by bisection: a limit that can be met is found fast, while one
        # that cannot is given up only after many steps.
        stride = (high - low) // 8 + 1
        while low < high and time.monotonic() < deadline:
            limit = max(low, high - stride)
            peak = walk(limit)
            if peak is not None:
                high = min(limit, peak)
            elif stride <= high >> 10:
                return
            else:
                low = max(low, limit + 1)
                stride = (stride + 1) // 2


def _orders(problem: Problem, deadline: float) -> Iterator[list[int]]:
    """The listed order, and the one that greedily makes the least and frees the most."""
    listed = list(range(len(problem.ops)))
    yield listed
    if time.monotonic() < deadline and (lean := _lean_order(problem)) != listed:
        yield lean


def _lean_order(problem: Problem) -> list[int]:
    """Each time the ready op after which the least memory is in use; ties in listed order."""
    sizes = [value.size for value in problem.values]
    producer, readers = problem.producer, problem.readers
    stays = set(problem.outputs) | set(problem.held) | set(problem.resident)
    unread = [len(ids) for ids in readers]
    # By value and not by producer: an op that reads two outputs of one op waits for both.
    missing = [sum(producer[v] >= 0 for v in op.inputs) for op in problem.ops]

    # How much more is in memory after op i: what it makes, less what it reads for the last time.
    # The op id breaks ties.
    def growth(i: int) -> tuple[int, int]:
        op = problem.ops[i]
        made = sum(sizes[v] for v in op.outputs if v in stays or unread[v])
        freed = sum(sizes[v] for v in op.inputs if unread[v] == 1 and v not in stays)
        return made - freed, i

    # What an op frees changes as others read its inputs: then it is entered anew, and entries that
    # are no longer true are passed over.
    ready = [growth(i) for i, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    done = [False] * len(missing)
    order: list[int] = []
    while ready:
        entry = heapq.heappop(ready)
        i = entry[1]
        if done[i] or entry != growth(i):
            continue
        done[i] = True
        order.append(i)
        for v in problem.ops[i].outputs:
            for reader in readers[v]:
                missing[reader] -= 1
                if missing[reader] == 0:
                    heapq.heappush(ready, growth(reader))
        for v in problem.ops[i].inputs:
            unread[v] -= 1
            if unread[v] == 1 and v not in stays:
                last = next(reader for reader in readers[v] if not done[reader])
                if missing[last] == 0:
                    heapq.heappush(ready, growth(last))
    return order


def _forward_ops(problem: Problem) -> list[int]:
    """The ops before the loss; without a loss op, all of them."""
    loss = problem.loss_op
    if loss is None:
        return list(range(len(problem.ops)))
    return [i for i, op in enumerate(problem.ops) if i < loss and op.phase != "backward"]


def segmentations(problem: Problem, max_trials: int = 48) -> Iterator[list[int]]:
    """Schedules in two, three, ... equal segments."""
    for count in _segment_counts(len(_forward_ops(problem)), max_trials):
        yield segmented(problem, count)


def _segment_counts(num_ops: int, max_trials: int) -> Iterator[int]:
    if num_ops <= max_trials:
        yield from range(2, num_ops + 1)
        return
    # Even ratios: from 2 segments to 3 the schedule changes more than from 40 to 41.
    ratio = num_ops ** (1 / max_trials)
    last = 1
    for k in range(max_trials + 1):
        count = max(last + 1, round(ratio**k))
        if count > num_ops:
            return
        yield count
        last = count


def segmented(problem: Problem, num_segments: int) -> list[int]:
    """The schedule that keeps only what crosses the cuts of `num_segments` equal segments.

    Equal by the bytes that the ops make, so that wide and narrow parts balance.
    """
    forward = _forward_ops(problem)
    segment_of = _cut(problem, forward, num_segments)
    producer = problem.producer
    # What is kept is a set of values, so a graph that is no chain needs no special care: every
    # value that crosses a cut is in it, skips included.
    keep = set(problem.outputs) | set(problem.held)
    # Values without size stand for order: they cost nothing to keep, and much to recompute.
    keep.update(v for v, value in enumerate(problem.values) if not value.size)
    for i in forward:
        for v in problem.ops[i].inputs:
            if producer[v] >= 0 and segment_of[producer[v]] != segment_of[i]:
                keep.add(v)
    # What a run-once op makes cannot come back; what it reads must be there when it runs.
    for op in problem.ops:
        if op.once:
            keep.update(op.outputs)
    return _replay(problem, segment_of, keep)


def _cut(problem: Problem, forward: list[int], num_segments: int) -> dict[int, int]:
    sizes = [sum(problem.values[v].size for v in problem.ops[i].outputs) for i in forward]
    total = sum(sizes) or 1
    segment_of: dict[int, int] = {}
    before = 0
    for i, size in zip(forward, sizes, strict=True):
        # The last one also has what comes after the last byte.
        segment_of[i] = min(num_segments - 1, before * num_segments // total)
        before += size
    return segment_of


def _replay(problem: Problem, segment_of: dict[int, int], keep: set[int]) -> list[int]:
    """The listed order; when a segment ends its unkept values are gone, and what is read later
    and gone is brought back, with the ancestors that are gone too."""
    producer = problem.producer
    resident = set(problem.resident)
    there = [v in resident for v in range(len(problem.values))]
    steps: list[int] = []
    made_in: list[int] = []
    current = 0

    # On a stack of our own: what is missing may be a chain as long as the segment.
    def run(i: int) -> None:
        stack = [i]
        while stack:
            top = stack[-1]
            missing = [v for v in problem.ops[top].inputs if not there[v]]
            if missing:
                stack.extend(producer[v] for v in missing)
                continue
            stack.pop()
            if top != i and all(there[v] for v in problem.ops[top].outputs):
                continue
            steps.append(top)
            for v in problem.ops[top].outputs:
                there[v] = True
                made_in.append(v)

    for i in range(len(problem.ops)):
        if i in segment_of and segment_of[i] != current:
            current = segment_of[i]
            for v in made_in:
                if v not in keep:
                    there[v] = False
            made_in.clear()
        run(i)
    # Runs whose results nothing reads in the end may be left over.
    return _native.drop_dead_runs(problem.native, steps)
