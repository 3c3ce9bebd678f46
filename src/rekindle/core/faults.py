"""Why a schedule cannot be executed, in one sentence: from the fault that the native core names."""

from collections.abc import Callable

from rekindle import _native
from rekindle.core.problem import Problem
from rekindle.core.schedule import TRANSFER_KINDS, Schedule
from rekindle.errors import brief


def no_such_step(problem: Problem, schedule: Schedule) -> str:
    """Of a schedule that the native core does not even take: its ids are 32-bit whole numbers, and
    its kinds of transfers are four."""
    # One step after the other, in Python: only a schedule that is refused comes here.
    for step, found in enumerate(schedule.steps):
        if isinstance(found, tuple):
            kind, value_id = found
            if kind not in TRANSFER_KINDS:
                return (
                    f"step {step} is a {brief(kind)!r}; a transfer is one of "
                    f"{', '.join(TRANSFER_KINDS)}"
                )
            if type(value_id) is not int or not 0 <= value_id < len(problem.values):
                return f"step {step} moves value {brief(value_id)}, {_existing(problem)}"
        elif type(found) is not int or not 0 <= found < len(problem.ops):
            return _no_such_op(problem, step, found)
    return "the places of the transfers are not whole numbers from 0 to the number of ops"


def _no_such_op(problem: Problem, step: int, found: object) -> str:
    last = len(problem.ops) - 1
    return f"step {step} names op {brief(found)}, and the problem has ops 0 to {last}"


def _existing(problem: Problem) -> str:
    return f"and the problem has values 0 to {len(problem.values) - 1}"


def fault_sentence(problem: Problem, schedule: Schedule, trace: _native.Trace) -> str:
    """What is wrong, at which step, and what would be right."""

    # Names are cut: they come from files, and a sentence is to stay one line.
    def op_name(op_id: int) -> str:
        return f"op {op_id} ({brief(problem.ops[op_id].name, 80)!r})"

    def value_name(value_id: int) -> str:
        return f"value {value_id} ({brief(problem.values[value_id].name, 80)!r})"

    match trace.fault:
        case _native.Fault.no_such_op:
            return _no_such_op(problem, trace.step, trace.op)
        case _native.Fault.not_produced:
            # After a drop "has produced it" would be wrong: a step has, and its copy is gone.
            when = " before any step has produced it"
            if schedule.transfers:
                when = ", which is not on the device: produce or fetch it first"
            return (
                f"step {trace.step} runs {op_name(trace.op)}, which reads "
                f"{value_name(trace.value)}{when}"
            )
        case _native.Fault.once_broken:
            return (
                f"{op_name(trace.op)} must stand exactly once in the schedule and stands "
                f"{trace.times} times"
            )
        case _native.Fault.output_missing:
            if schedule.transfers:
                return f"output {value_name(trace.value)} is not on the device at the end"
            return f"output {value_name(trace.value)} is never produced by the schedule"
        case _native.Fault.misplaced:
            return (
                f"a transfer of value {trace.value} stands before op number {trace.step}; "
                "transfers must be listed in execution order, among the schedule's "
                f"{len(schedule.ops)} ops"
            )
        case _native.Fault.host_budget:
            assert problem.transfers is not None
            return (
                f"step {trace.step} needs {trace.host_peak} bytes in host memory, and its budget "
                f"is {problem.transfers.host_budget}"
            )
        case _:
            return _transfer_sentence(problem, schedule, trace, value_name)


def _transfer_sentence(
    problem: Problem,
    schedule: Schedule,
    trace: _native.Trace,
    value_name: Callable[[int], str],
) -> str:
    """What is wrong with a transfer of a value, or with what follows from it."""
    # The native core takes any id of 32 bits, so there may be no such value to name.
    if not 0 <= trace.value < len(problem.values):
        return f"step {trace.step} moves value {trace.value}, {_existing(problem)}"
    value = value_name(trace.value)
    if trace.fault == _native.Fault.not_dropped:
        # The step beyond the last one: the fault is that nothing came.
        if trace.step == len(schedule):
            return f"{value} was sent and is never dropped; a sent copy ends by its drop"
        return f"step {trace.step} makes {value} again before the copy that was sent is dropped"
    if trace.fault == _native.Fault.not_read:
        return f"step {trace.step} fetches {value}, and no op reads that copy"
    # All that is left are faults of the transfer that stands at that step.
    step = schedule.steps[trace.step]
    assert isinstance(step, tuple)
    start = f"step {trace.step} is a {step[0]} of {value}"
    match trace.fault:
        case _native.Fault.no_link:
            return f"{start}, and the problem has no transfers"
        case _native.Fault.not_movable:
            assert problem.transfers is not None
            if trace.value in problem.resident:
                return f"{start}, which is resident and never moved"
            return (
                f"{start} of {problem.values[trace.value].size} bytes; values smaller than "
                f"{problem.transfers.least} bytes are never moved"
            )
        case _native.Fault.not_on_device:
            return f"{start}, which is not on the device"
        case _native.Fault.on_host:
            return f"{start}, which is on the host already"
        case _native.Fault.not_sent:
            return f"{start}, whose newest copy on the device was not sent"
        case _:
            return f"{start}, which is not on the host"
