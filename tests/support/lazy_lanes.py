"""Lanes on which copies run at the worst time that is allowed, to find a wait that is missing.

Ops run when they are called. A copy of a lane that is late runs only when something waits for it;
one of a lane that is early runs at once, with all that it waits for. A GPU may do either, and
anything between. What a copy is to fill holds garbage until it has run.
"""

from dataclasses import dataclass
from typing import Any

import torch

from rekindle.runtime.transfer_lanes import Lane

MODES = (
    frozenset(),
    frozenset({"to_host"}),
    frozenset({"from_host"}),
    frozenset({"to_host", "from_host"}),
)


@dataclass(frozen=True, slots=True)
class Point:
    lanes: "LazyLanes"  # of another test, where host memory outlives it
    lane: Lane
    at: int  # this many entries of the lane's queue are before it


class LazyLanes:
    """One for all steps, as the side streams of a device are."""

    def __init__(self, late: frozenset[str]) -> None:
        self.late = late
        self.queues: dict[str, list[Any]] = {"to_host": [], "from_host": []}
        self.done = {"to_host": 0, "from_host": 0}
        self.behind_ops = {"to_host": False, "from_host": False}
        self.num_copies = 0

    def __call__(self, _device: torch.device) -> "LazyLanes":
        return self

    def record(self, lane: Lane) -> Point:
        return Point(self, lane, len(self.queues.get(lane, ())))

    def wait(self, lane: Lane, point: Point) -> None:
        if lane == "compute" or point.lanes is not self:
            point.lanes.run_until(point)
            return
        if point.lane == "compute":
            self.behind_ops[lane] = True
        else:
            self.queues[lane].append(point)

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        # Ops run at once here, so that a transfer that does not wait for them would go unseen.
        assert self.behind_ops[lane], f"a copy on {lane} does not wait for the ops before it"
        self.behind_ops[lane] = False
        self.num_copies += 1
        if lane == "from_host":
            target.fill_(255)
        self.queues[lane].append((target, source))
        if lane not in self.late:
            self.run_until(self.record(lane))

    def run_until(self, point: Point) -> None:
        if point.lane == "compute":
            return
        queue = self.queues[point.lane]
        while self.done[point.lane] < point.at:
            entry = queue[self.done[point.lane]]
            # Counted first: what it waits for may lie on the other lane, never behind it here.
            if isinstance(entry, Point):
                self.run_until(entry)
            else:
                entry[0].copy_(entry[1])
                queue[self.done[point.lane]] = None
            self.done[point.lane] += 1
