"""The only accounting of bytes and time: (problem, schedule) -> Trace.

Each step that makes a value makes a new copy of it. A copy lives from that step to its last use
before the value is recomputed; the last copy of an output and the held copy of a held value live
to the end; a copy that is never used lives during its own step. Memory at a step is the sizes of
all copies alive at it, plus the op's workspace, minus each in-place output whose paired input's
copy has its last use there. The work is done in C++ (`cpp/core/simulate.cpp`).

Of transfers: a fetched copy is a copy like any other, a sent copy lives to its drop, and host
memory counts a value from its send to its release. Memory never depends on how long anything takes.
Time runs on three lanes (`cpp/core/lanes.cpp`): ops one after the other, sends, and fetches. A
transfer begins when its lane is free and the steps that stand before it are done; the cost is the
time at which the last lane ends.
"""

from dataclasses import dataclass

from rekindle import _native
from rekindle.core.faults import fault_sentence, no_such_step
from rekindle.core.problem import Problem
from rekindle.core.schedule import TRANSFER_KINDS, Schedule
from rekindle.errors import InvalidSchedule


@dataclass(frozen=True, slots=True)
class Lanes:
    """When each step begins and ends, in ns from the start: ops and drops on the compute lane,
    sends and releases on the one to the host, fetches on the one from the host."""

    start: tuple[int, ...]  # per step; of a drop or a release, when the waiting begins
    finish: tuple[int, ...]  # per step
    compute: int  # when the lane ends
    to_host: int
    from_host: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a schedule needs: memory at each step, the peak, the cost."""

    memory: tuple[int, ...]  # per step
    peak: int
    peak_step: int  # the first step at the peak; -1 for an empty schedule
    cost: int
    runs: tuple[int, ...]  # per op: how often it runs
    # Of a schedule with transfers; any other has nothing on the host and one lane.
    host_memory: tuple[int, ...] = ()  # per step
    host_peak: int = 0
    lanes: Lanes | None = None

    @property
    def num_recomputed(self) -> int:
        """Steps that run an op again."""
        return sum(r - 1 for r in self.runs if r > 1)


@dataclass(frozen=True, slots=True)
class Copy:
    """One making of a value: alive from step `first` to step `last`, both included."""

    value_id: int
    first: int
    last: int  # the number of steps where the copy outlives the schedule


def run_native(problem: Problem, schedule: Schedule) -> _native.Trace:
    """The native trace of a valid schedule; raises InvalidSchedule for any other."""
    if schedule.transfers:
        return _run_with_transfers(problem, schedule)[0]
    native = problem.native
    try:
        trace = _native.simulate(native, list(schedule.ops))
    except TypeError:  # a step that is no whole number of 32 bits, from the binding
        raise InvalidSchedule(no_such_step(problem, schedule)) from None
    if trace.fault != _native.Fault.none:
        raise InvalidSchedule(fault_sentence(problem, schedule, trace))
    return trace


_KINDS = {kind: getattr(_native.TransferKind, kind) for kind in TRANSFER_KINDS}


def _run_with_transfers(
    problem: Problem, schedule: Schedule
) -> tuple[_native.Trace, _native.Lanes]:
    native = problem.native
    try:
        transfers = [(_KINDS[t.kind], t.value_id, t.before) for t in schedule.transfers]
        trace, lanes = _native.simulate_transfers(native, list(schedule.ops), transfers)
    except (TypeError, KeyError):
        raise InvalidSchedule(no_such_step(problem, schedule)) from None
    if trace.fault != _native.Fault.none:
        raise InvalidSchedule(fault_sentence(problem, schedule, trace))
    assert lanes is not None  # a problem without a link has no valid transfers
    if lanes.too_late is not None:
        raise InvalidSchedule(
            f"step {lanes.too_late} ends 2^62 ns or more after the start; all times of a schedule "
            "with transfers must stay below"
        )
    return trace, lanes


def simulate(problem: Problem, schedule: Schedule) -> Trace:
    """Runs a schedule in numbers alone. This is the only place that counts memory; an invalid
    schedule raises `InvalidSchedule`."""
    if schedule.transfers:
        return _simulate_transfers(problem, schedule)
    trace = run_native(problem, schedule)
    runs = tuple(trace.runs)
    # Summed here, in whole numbers of any size: many runs may go beyond 64 bits.
    cost = sum(r * op.cost for r, op in zip(runs, problem.ops, strict=True) if r)
    return Trace(
        memory=tuple(trace.memory),
        peak=trace.peak,
        peak_step=trace.peak_step,
        cost=cost,
        runs=runs,
    )


def _simulate_transfers(problem: Problem, schedule: Schedule) -> Trace:
    trace, lanes = _run_with_transfers(problem, schedule)
    return Trace(
        memory=tuple(trace.memory),
        peak=trace.peak,
        peak_step=trace.peak_step,
        cost=lanes.cost,  # in time that passes, not a sum: the lanes run side by side
        runs=tuple(trace.runs),
        host_memory=tuple(trace.host_memory),
        host_peak=trace.host_peak,
        lanes=Lanes(
            start=tuple(lanes.start),
            finish=tuple(lanes.finish),
            compute=lanes.compute,
            to_host=lanes.to_host,
            from_host=lanes.from_host,
        ),
    )


def copies(problem: Problem, schedule: Schedule) -> tuple[Copy, ...]:
    """Every copy that a valid schedule makes, in the order it makes them."""
    return tuple(Copy(*row) for row in run_native(problem, schedule).copies)
