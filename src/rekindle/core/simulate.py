"""The only accounting of bytes and time: (problem, schedule) -> Trace.

Each step that makes a value makes a new copy of it. A copy lives from that step to its last use
before the value is made again; the last copy of an output and the held copy of a held value live
to the end; a copy that is never used lives during its own step. Memory at a step is the sizes of
all copies alive at it, plus the op's workspace, minus each in-place output whose paired input's
copy has its last use there. The work is done in C++ (`cpp/core/simulate.cpp`).
"""

from dataclasses import dataclass

from rekindle import _native
from rekindle.core.problem import Problem
from rekindle.core.schedule import Schedule
from rekindle.errors import InvalidSchedule, brief


@dataclass(frozen=True, slots=True)
class Trace:
    memory: tuple[int, ...]  # per step
    peak: int
    peak_step: int  # the first step at the peak; -1 for an empty schedule
    cost: int
    runs: tuple[int, ...]  # per op: how often it runs

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
    native = problem.native
    try:
        trace = _native.simulate(native, list(schedule.ops))
    except TypeError:
        # What is no 32-bit whole number does not reach the native core.
        step, bad = next(
            (step, op)
            for step, op in enumerate(schedule.ops)
            if type(op) is not int or not 0 <= op < len(problem.ops)
        )
        raise InvalidSchedule(
            f"step {step} names op {brief(bad)}, and the problem has ops 0 to "
            f"{len(problem.ops) - 1}"
        ) from None
    if trace.fault != _native.Fault.none:
        raise InvalidSchedule(_sentence(problem, trace))
    return trace


def simulate(problem: Problem, schedule: Schedule) -> Trace:
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


def copies(problem: Problem, schedule: Schedule) -> tuple[Copy, ...]:
    """Every copy that a valid schedule makes, in the order it makes them."""
    return tuple(Copy(*row) for row in run_native(problem, schedule).copies)


def _sentence(problem: Problem, trace: _native.Trace) -> str:
    def op_name(op_id: int) -> str:
        return f"op {op_id} ({brief(problem.ops[op_id].name, 80)!r})"

    def value_name(value_id: int) -> str:
        return f"value {value_id} ({brief(problem.values[value_id].name, 80)!r})"

    match trace.fault:
        case _native.Fault.no_such_op:
            return (
                f"step {trace.step} names op {trace.op}, and the problem has ops 0 to "
                f"{len(problem.ops) - 1}"
            )
        case _native.Fault.not_produced:
            return (
                f"step {trace.step} runs {op_name(trace.op)}, which reads "
                f"{value_name(trace.value)} before any step has produced it"
            )
        case _native.Fault.once_broken:
            return (
                f"{op_name(trace.op)} must stand exactly once in the schedule and stands "
                f"{trace.times} times"
            )
        case _:
            return f"output {value_name(trace.value)} is never produced by the schedule"
