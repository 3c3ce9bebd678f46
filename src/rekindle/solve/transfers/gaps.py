"""Where a value could be away: the gaps of an op sequence.

A gap lies between two uses of one copy of a value, or between its last use and the end where it is
an output. In it the bytes can be on the host: sent after the op that makes the copy, dropped after
the use before the gap, fetched before the use behind it. All positions are those of ops; a gap
relieves the ops from `left` + 1 to `right` - 1.

Values are what their op makes of its inputs, each time the same. So what the host has of a value
serves every gap of it, also of a copy that was recomputed, and a value is sent once.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.core import Problem, Schedule, copies, simulate

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch over which a value lies idle: it can be sent and fetched, or be recomputed."""

    value_id: int
    made: int  # the op that makes the copy
    left: int  # the last use before the gap (`made`, where there is none)
    right: int  # the first use behind it; the number of ops: it is an output
    size: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """An op sequence with what choosing among its gaps needs to know."""

    problem: Problem
    ops: tuple[int, ...]
    memory: Numbers  # per op, without transfers
    at_end: int  # bytes that live on: outputs and what is held
    begins: Numbers  # per op: when it starts if nothing waits; one more: the end
    gaps: tuple[Gap, ...]

    @property
    def num_ops(self) -> int:
        return len(self.ops)


def sequence_of(problem: Problem, ops: tuple[int, ...]) -> Sequence:
    """Of a valid op sequence, of a problem whose numbers fit 62 bits."""
    costs = np.fromiter((problem.ops[i].cost for i in ops), np.int64, len(ops))
    begins = np.concatenate((np.zeros(1, np.int64), np.cumsum(costs)))
    trace = simulate(problem, Schedule(ops))
    memory = np.array(trace.memory, np.int64)
    made = copies(problem, Schedule(ops))
    at_end = sum(problem.values[c.value_id].size for c in made if c.last == len(ops))
    return Sequence(problem, ops, memory, at_end, begins, tuple(_gaps(problem, ops)))


def _gaps(problem: Problem, ops: tuple[int, ...]) -> list[Gap]:
    assert problem.transfers is not None
    least = max(1, problem.transfers.least)  # moving no bytes relieves nothing
    sizes = [value.size for value in problem.values]
    movable = [size >= least for size in sizes]
    for v in problem.resident:
        movable[v] = False
    newest: dict[int, tuple[int, int]] = {}  # value -> the op that made its newest copy, last use
    held: set[int] = set()  # held copies live to the end whatever is dropped
    gaps: list[Gap] = []

    def close(v: int, right: int) -> None:
        made, left = newest[v]
        if right - left > 1 and v not in held:
            gaps.append(Gap(v, made, left, right, sizes[v]))

    for k, i in enumerate(ops):
        op = problem.ops[i]
        for v in op.inputs:
            if movable[v]:
                close(v, k)
                newest[v] = (newest[v][0], k)
                if op.phase == "loss" and v in problem.held:
                    held.add(v)
        for v in op.outputs:
            newest[v] = (k, k)
            held.discard(v)
    for v in problem.outputs:
        if movable[v] and v in newest:
            close(v, len(ops))
    return gaps
