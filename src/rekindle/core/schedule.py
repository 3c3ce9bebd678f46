"""`Schedule`: the steps in execution order. An op that stands twice is recomputed.

A step runs an op or moves a value between the device and host memory. The ops are a list of their
own, and each transfer says before which of them it stands: whoever knows no transfers reads `ops`,
and a schedule without any is only that list.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rekindle.core.problem import Problem

# send: begins to copy the newest device copy to the host. drop: waits for that, and ends the device
# copy. fetch: begins to make a device copy of the host copy. release: waits for the last fetch, and
# gives the bytes on the host back.
TransferKind = Literal["send", "drop", "fetch", "release"]
TRANSFER_KINDS: tuple[TransferKind, ...] = ("send", "drop", "fetch", "release")
Step = int | tuple[TransferKind, int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One value moved to the host or back, freed here or there."""

    kind: TransferKind
    value_id: int
    before: int  # position in the schedule's `ops`; their number: after the last


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ids of ops in execution order, each as often as it runs, and transfers between them."""

    ops: tuple[int, ...]
    transfers: tuple[Transfer, ...] = ()  # in execution order

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.ops) + len(self.transfers)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Ops as their ids, transfers as (kind, value id)."""
        if not self.transfers:
            return self.ops
        steps: list[Step] = []
        start = 0
        for transfer in self.transfers:
            steps += self.ops[start : transfer.before]
            steps.append((transfer.kind, transfer.value_id))
            start = max(start, transfer.before)
        steps += self.ops[start:]
        return tuple(steps)


def schedule_of(steps: Iterable[Step]) -> Schedule:
    """The schedule that has these steps."""
    ops: list[int] = []
    transfers: list[Transfer] = []
    for step in steps:
        if isinstance(step, int):
            ops.append(step)
        else:
            transfers.append(Transfer(step[0], step[1], len(ops)))
    return Schedule(tuple(ops), tuple(transfers))


def keep_all(problem: Problem) -> Schedule:
    """Every op once, in the listed order."""
    return Schedule(tuple(range(len(problem.ops))))
