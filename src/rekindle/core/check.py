"""What a problem and a schedule must keep, checked at each stage's door."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NoReturn

from rekindle.core.problem import HostLink, Op, Problem
from rekindle.core.schedule import Schedule
from rekindle.core.simulate import run_native
from rekindle.errors import InvalidProblem, brief

# Sizes, costs and their sums stay below it: the native core adds two of them in 64 signed bits.
LIMIT = 2**62
PHASES = (None, "forward", "loss", "backward")


def check_problem(problem: Problem) -> None:
    """Raises InvalidProblem with one sentence that says what, where and what is expected."""
    num_values, num_ops = len(problem.values), len(problem.ops)
    # Ids are checked before anything is looked up by them.
    for v, value in enumerate(problem.values):
        _number(value.size, f"the size of value {v}")
    _sum((value.size for value in problem.values), "sizes of all values")
    for ids, where in (
        (problem.resident, "resident"),
        (problem.outputs, "outputs"),
        (problem.held, "held"),
    ):
        _ids(ids, num_values, where)
    resident = set(problem.resident)
    producer: list[int] = [-1] * num_values
    loss = None
    for i, op in enumerate(problem.ops):
        _check_op(op, i, num_values, num_ops)
        for v in op.outputs:
            if v in resident:
                _fail(
                    f"op {i} produces value {v}, which is resident; a resident value has no "
                    "producer"
                )
            if producer[v] >= 0:
                _fail(
                    f"value {v} is produced by op {producer[v]} and again by op {i}; give each "
                    "its own value"
                )
            producer[v] = i
        _check_inplace(problem, op, i, resident)
        if op.phase == "loss":
            if loss is not None:
                _fail(f"ops {loss} and {i} both have phase 'loss'; at most one op may")
            loss = i
    _sum((op.cost for op in problem.ops), "costs of all ops")
    _check_order(problem, producer, resident)
    if problem.transfers is not None:
        _check_link(problem.transfers)
    # The caller keeps what the loss op reads: only of that there is a copy to hold.
    loss_inputs = set(problem.ops[loss].inputs) if loss is not None else set()
    for v in problem.held:
        if v not in loss_inputs:
            _fail(f"value {v} is held but is not an input of the loss op")
    _check_pinned(problem)


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Raises InvalidSchedule with one sentence if the schedule cannot be executed."""
    run_native(problem, schedule)


def _check_op(op: Op, i: int, num_values: int, num_ops: int) -> None:
    _number(op.cost, f"the cost of op {i}")
    _number(op.workspace, f"the workspace of op {i}")
    _ids(op.inputs, num_values, f"the inputs of op {i}")
    _ids(op.outputs, num_values, f"the outputs of op {i}")
    # Simulation and liveness know an op by the copies it makes.
    if not op.outputs:
        _fail(f"op {i} has no outputs; an op has one or more")
    # A value is one state of a storage: what an op writes over is another value than it read.
    both = set(op.inputs).intersection(op.outputs)
    if both:
        _fail(f"value {min(both)} is both an input and an output of op {i}")
    if op.phase not in PHASES:
        _fail(
            f"the phase of op {i} is {brief(op.phase)!r}; expected 'forward', 'loss', 'backward', "
            "null"
        )
    if op.grad_of is not None and not (type(op.grad_of) is int and 0 <= op.grad_of < num_ops):
        _fail(f"grad_of of op {i} is {brief(op.grad_of)}, and there are ops 0 to {num_ops - 1}")


def _check_inplace(problem: Problem, op: Op, i: int, resident: set[int]) -> None:
    if not op.inplace:
        return
    sources = {v for v, _ in op.inplace}
    targets = {v for _, v in op.inplace}
    inputs, outputs = set(op.inputs), set(op.outputs)
    for v, out in op.inplace:
        if v not in inputs or out not in outputs:
            _fail(
                f"the inplace pair [{brief(v)}, {brief(out)}] of op {i} is not an input and an "
                "output of that op"
            )
        # It is there at every step, and so must be what it was.
        if v in resident:
            _fail(f"the inplace pair [{v}, {out}] of op {i} overwrites a resident value")
        # One storage serves both, and a storage has one size.
        if problem.values[v].size != problem.values[out].size:
            _fail(
                f"the inplace pair [{v}, {out}] of op {i} has unequal sizes "
                f"{problem.values[v].size} and {problem.values[out].size}"
            )
    if len(sources) < len(op.inplace) or len(targets) < len(op.inplace):
        _fail(f"the inplace pairs of op {i} name a value twice; one storage holds one output")


def _check_order(problem: Problem, producer: Sequence[int], resident: set[int]) -> None:
    for v, by in enumerate(producer):
        if by < 0 and v not in resident:
            _fail(f"value {v} is neither resident nor produced by an op; it must be one of them")
    for i, op in enumerate(problem.ops):
        # The listed order is keep-all's, and every solver starts from it.
        for v in op.inputs:
            if producer[v] >= i:
                _fail(
                    f"op {i} reads value {v} before op {producer[v]} produces it; list the ops "
                    "in a valid execution order"
                )


def _check_pinned(problem: Problem) -> None:
    num_values, num_ops = len(problem.values), len(problem.ops)
    for v, backward in problem.pinned:
        if type(v) is not int or not 0 <= v < num_values:
            _fail(f"pinned: {brief(v)} is not a value id; there are values 0 to {num_values - 1}")
        if type(backward) is not int or not 0 <= backward < num_ops:
            _fail(f"pinned: {brief(backward)} is not an op id; there are ops 0 to {num_ops - 1}")
        pair = f"the pinned pair [{v}, {backward}]"
        forward = problem.ops[backward].grad_of
        if forward is None or forward >= backward:
            _fail(f"{pair} names an op that is the gradient of no op before it")
        # "The copy that the forward read" and "until the backward" are one copy and one step only
        # where both run once.
        for i in (forward, backward):
            if not problem.ops[i].once:
                _fail(f"{pair} needs op {i} to run once, and it is recomputable")
        if v not in problem.ops[forward].inputs:
            _fail(f"{pair}: op {forward} does not read value {v}")
    if len(set(problem.pinned)) < len(problem.pinned):
        _fail("pinned: a pair stands twice; name each pair once")
    if problem.pinned and problem.transfers is not None:
        _fail(
            "a problem with pinned values has transfers; what an opaque op holds cannot be moved, "
            "so a problem has one or the other"
        )


def _check_link(link: HostLink) -> None:
    _number(link.to_host, "transfers: to_host", least=1)
    _number(link.from_host, "transfers: from_host", least=1)
    _number(link.latency, "transfers: latency")
    _number(link.least, "transfers: least")
    if link.host_budget is not None:
        _number(link.host_budget, "transfers: host_budget")


def _number(x: object, what: str, least: int = 0) -> None:
    # type(), not isinstance: True is an int, and no size.
    if type(x) is not int or not least <= x < LIMIT:
        _fail(f"{what} is {brief(x)}; expected a whole number from {least} to 2^62 - 1")


def _ids(ids: Sequence[object], count: int, where: str) -> None:
    for v in ids:
        if type(v) is not int or not 0 <= v < count:
            _fail(f"{where}: {brief(v)} is not a value id; there are values 0 to {count - 1}")
    if len(set(ids)) < len(ids):
        twice = next(v for v, count in Counter(ids).items() if count > 1)
        _fail(f"{where}: value {twice} stands twice; name each value once")


def _sum(numbers: Iterable[int], what: str) -> None:
    # In whole numbers of any size; the native core adds up in 64 bits and relies on this.
    if sum(numbers) >= LIMIT:
        _fail(f"the sum of the {what} is 2^62 or more")


def _fail(sentence: str) -> NoReturn:
    raise InvalidProblem(sentence)
