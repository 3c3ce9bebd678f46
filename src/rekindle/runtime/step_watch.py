"""The first steps of a plan, watched: whether one needs more than its budget, and in which section.

A plan cannot see what the caller does between forward and backward (a loss, metrics, hooks), and a
kernel may take another workspace than it took when it was measured. The allocator's own account
tells: at points that a step passes anyway (its begin, the end of the forward, the begin of the
backward, the end of each of its stretches) the peak so far is read. That is a counter on the host:
nothing waits for the device. The section in which the counter rises above the budget is the one
that needs more; `with_excess` adds to the problem what it needed.

A CPU's allocator keeps no such account, and making one costs more than the step: nothing is watched
there.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from rekindle.core import Problem, Schedule, simulate
from rekindle.torch_compat import outside_modes

NUM_STEPS = 3  # that are watched of each plan
NUM_CORRECTIONS = 3
_SHARE_OF_ROOM = 0.9  # the rest is for fragmentation
_MAX_BEGUN = 20  # calls without a backward, too, end the watch


class Meter(Protocol):
    """The account of one device's allocator."""

    def allocated_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def reset_peak(self) -> None: ...
    def warm_up(self) -> None: ...


class CudaMeter:
    """The caching allocator's counters, which are on the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def warm_up(self) -> None:
        """Libraries take memory for good at their first call in each thread (cuBLAS 32 MiB): that
        is resident, no step's."""
        with torch.cuda.device(self.device), outside_modes(), torch.enable_grad():
            x = torch.ones(8, 8, device=self.device, requires_grad=True)
            torch.autograd.grad((x @ x).sum(), x)


def meter_for(device: torch.device) -> Meter | None:
    """None where nothing tells without a cost."""
    return CudaMeter(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Excess:
    """What a section of a step needed, above what was allocated before the step."""

    section: str
    begin: int  # steps of the schedule
    stop: int
    peak_bytes: int


def with_excess(problem: Problem, schedule: Schedule, excess: Excess) -> Problem:
    """The problem in which this schedule needs in that section what was seen there. Which of its
    ops needed it is not known: each of them gets the workspace."""
    memory = simulate(problem, schedule).memory[excess.begin : excess.stop]
    more = max(0, excess.peak_bytes - max(memory))
    steps = schedule.steps[excess.begin : excess.stop]
    raised = {step for step in steps if isinstance(step, int)}
    ops = [
        replace(op, workspace=op.workspace + more) if i in raised else op
        for i, op in enumerate(problem.ops)
    ]
    return replace(problem, ops=tuple(ops))


class StepWatch:
    """Of one plan. Sections are counted: the forward, the caller's work, the backward's stretches;
    `bounds` are the steps of the schedule between which they lie."""

    def __init__(
        self, bounds: Sequence[int], limit_bytes: int, meter: Meter, num_corrections: int
    ) -> None:
        self.bounds, self.limit_bytes, self.meter = tuple(bounds), limit_bytes, meter
        self.num_corrections = num_corrections  # that may still be made
        self.num_left = NUM_STEPS
        self.num_begun = 0
        self.excess: Excess | None = None
        self._step: weakref.ref[Any] | None = None  # the one that is being watched
        self._base = self._peak = 0

    @property
    def is_over(self) -> bool:
        return self.num_left == 0 or self.num_begun >= _MAX_BEGUN

    def begin(self, step: Any) -> None:
        """A forward begins. While the backward of another is still to come nobody can tell which
        of the two needs what: then neither is watched."""
        busy = self._step is not None and self._step() is not None
        self._step = None
        if busy or self.is_over:
            return
        if not self.num_begun:
            self.meter.warm_up()
        self.num_begun += 1
        self._base = self.meter.allocated_bytes()
        # An earlier peak would hide this step's. One that could not is left to whoever reads it.
        if self.meter.peak_bytes() > self._base + self.limit_bytes:
            self.meter.reset_peak()
        self._peak = self.meter.peak_bytes()
        self._step = weakref.ref(step)

    def reached(self, step: Any, section: int) -> None:
        """The end of a section."""
        if self._step is None or self._step() is not step:
            return
        peak, before = self.meter.peak_bytes(), self._peak
        self._peak = peak
        above = peak - self._base
        known = self.limit_bytes if self.excess is None else self.excess.peak_bytes
        if peak > before and above > known:
            name = ("the forward", "what the caller does between forward and backward")
            self.excess = Excess(
                name[section] if section < 2 else "the backward",
                self.bounds[section],
                self.bounds[section + 1],
                above,
            )
        if section == len(self.bounds) - 2:
            self._step = None
            self.num_left -= 1

    def room_bytes(self) -> int:
        """Of a step that ran out of memory: what a step can have, by what this one had."""
        had = self.meter.allocated_bytes() - self._base
        return int(_SHARE_OF_ROOM * min(had, self.limit_bytes))

    def abandon(self) -> None:
        """The step takes another way than planned: nothing can be told of it."""
        self._step = None

    def take(self) -> Excess | None:
        found, self.excess = self.excess, None
        return found
