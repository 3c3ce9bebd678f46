"""Optima over ALL valid schedules with transfers of tiny problems (about 6 ops): any order, any
repeats, any transfers.

Shortest paths over what is where and when the lanes are free. A state holds the device copies
(those that were sent and not dropped apart), the values on the host, and the run-once ops that have
run; a label of it the times at which lanes end and copies arrive. Of two labels the one that is
late everywhere goes. Freeing is a choice here, as in `brute_force`. Without a host budget nothing
is ever better for a release; problems have no in-place pairs and hold nothing.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.core import Problem, Schedule, schedule_of
from rekindle.core.schedule import Step

from .reference_transfers import transfer_ns

State = tuple[frozenset[int], frozenset[int], frozenset[int], frozenset[int]]
# Lane ends, then (kind, value, time), sorted: arrivals, sends that run, host copies.
Times = tuple[int, ...]


@dataclass(frozen=True)
class Optimum:
    cost: int
    schedule: Schedule


def cheapest(problem: Problem, budget: int) -> Optimum | None:
    """The schedule within the budget that ends first; None if there is none (a proof)."""
    assert problem.transfers is not None
    assert problem.transfers.host_budget is None
    assert not problem.transfers.serial
    assert not problem.held
    assert not any(op.inplace for op in problem.ops)
    return _Search(problem, budget).run()


class _Search:
    def __init__(self, problem: Problem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.link = problem.transfers
        self.num_values = len(problem.values)
        self.sizes = [value.size for value in problem.values]
        self.resident = frozenset(problem.resident)
        self.wanted = frozenset(problem.outputs) - self.resident
        self.once = frozenset(i for i, op in enumerate(problem.ops) if op.once)
        self.movable = frozenset(
            v
            for v, size in enumerate(self.sizes)
            if v not in self.resident and size >= max(1, self.link.least)
        )

    def run(self) -> Optimum | None:
        nothing: frozenset[int] = frozenset()
        # Per value: arrival of the device copy, end of its send, end of the host copy.
        start: Times = (0,) * (3 + 3 * self.num_values)
        first: State = (nothing, nothing, nothing, nothing)
        labels: dict[State, list[Times]] = {first: [start]}
        queue: list[tuple[int, int, State, Times, object]] = [(0, 0, first, start, None)]
        count = 0
        while queue:
            cost, _, state, times, steps = heapq.heappop(queue)
            if times not in labels[state]:
                continue  # a better label came after it was put here
            device, sent, _, ran = state
            if self.wanted <= device and sent <= self.wanted and ran >= self.once:
                return Optimum(cost, schedule_of(_unwind(steps)))
            for step, after, then in self.moves(state, times):
                known = labels.setdefault(after, [])
                if any(all(a <= b for a, b in zip(k, then, strict=True)) for k in known):
                    continue
                known[:] = [
                    k for k in known if not all(b <= a for a, b in zip(k, then, strict=True))
                ]
                known.append(then)
                count += 1
                path = steps if step is None else (steps, step)
                heapq.heappush(queue, (max(then[:3]), count, after, then, path))
        return None

    def moves(self, state: State, times: Times) -> Iterator[tuple[Step | None, State, Times]]:
        device, sent, host, ran = state
        n = self.num_values
        used = sum(self.sizes[v] for v in device)
        compute, to_host, from_host = times[:3]
        arrival, send_end, host_end = times[3 : 3 + n], times[3 + n : 3 + 2 * n], times[3 + 2 * n :]

        def changed(lanes: tuple[int, int, int], *changes: tuple[int, int, int]) -> Times:
            columns = [list(arrival), list(send_end), list(host_end)]
            for column, v, time in changes:
                columns[column][v] = time
            return (*lanes, *columns[0], *columns[1], *columns[2])

        for v in device - sent:  # freed
            yield None, (device - {v}, sent, host, ran), changed(times[:3], (0, v, 0))
        for i, op in enumerate(self.problem.ops):
            outputs = frozenset(op.outputs)
            # A copy that is made again is freed first, so these are all that need be tried.
            if outputs & device or (i in self.once and i in ran):
                continue
            reads = [v for v in op.inputs if v not in self.resident]
            if not device.issuperset(reads):
                continue
            if used + sum(self.sizes[v] for v in outputs) + op.workspace > self.budget:
                continue
            begin = max([compute, *(arrival[v] for v in reads)])
            lanes = (begin + op.cost, to_host, from_host)
            # What has arrived by now has no time of its own any more.
            yield (
                i,
                (device | outputs, sent, host, ran | ({i} & self.once)),
                changed(lanes, *((0, v, 0) for v in reads)),
            )
        for v in self.movable:
            if v in device and v not in host:
                begin = max(to_host, compute, arrival[v])
                end = begin + transfer_ns(self.link, self.sizes[v], self.link.to_host)
                then = changed((compute, end, from_host), (1, v, end), (2, v, end))
                yield ("send", v), (device, sent | {v}, host | {v}, ran), then
            if v in sent:
                lanes = (max(compute, send_end[v]), to_host, from_host)
                then = changed(lanes, (0, v, 0), (1, v, 0))
                yield ("drop", v), (device - {v}, sent - {v}, host, ran), then
            if v in host and v not in device and used + self.sizes[v] <= self.budget:
                begin = max(from_host, compute, host_end[v])
                end = begin + transfer_ns(self.link, self.sizes[v], self.link.from_host)
                then = changed((compute, to_host, end), (0, v, end))
                yield ("fetch", v), (device | {v}, sent, host, ran), then


def _unwind(steps: object) -> list[Step]:
    found: list[Step] = []
    while steps is not None:
        steps, step = steps  # type: ignore[misc]
        found.append(step)
    return found[::-1]
