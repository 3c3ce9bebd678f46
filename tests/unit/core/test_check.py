from dataclasses import replace

import pytest

from rekindle.core import Op, Problem, Schedule, Value, check_problem, check_schedule
from rekindle.core.problem import HostLink
from rekindle.errors import InvalidProblem, InvalidSchedule

# w (resident) -> f -> x -> relu (in place) -> y -> loss -> g -> b -> gw
GOOD = Problem(
    values=(Value("w", 8), Value("x", 16), Value("y", 16), Value("g", 4), Value("gw", 8)),
    ops=(
        Op("f", 3, (0,), (1,), phase="forward"),
        Op("relu", 1, (1,), (2,), inplace=((1, 2),), phase="forward"),
        Op("loss", 0, (2,), (3,), phase="loss"),
        Op("b", 7, (3, 0), (4,), recomputable=False, phase="backward", grad_of=0),
    ),
    resident=(0,),
    outputs=(4,),
    held=(2,),
)


def with_op(op_id, **changes):
    ops = list(GOOD.ops)
    ops[op_id] = replace(ops[op_id], **changes)
    return replace(GOOD, ops=tuple(ops))


def with_size(value_id, size):
    values = list(GOOD.values)
    values[value_id] = Value("v", size)
    return replace(GOOD, values=tuple(values))


OPAQUE = with_op(0, recomputable=False)

BAD = {
    "negative size": (with_size(1, -1), "size of value 1 is -1"),
    "size as text": (with_size(1, "16"), "size of value 1 is 16"),
    "true for a size": (with_size(3, True), "size of value 3 is True"),
    "size 2^62": (with_size(3, 2**62), "size of value 3"),
    "sum of sizes": (
        replace(GOOD, values=(Value("w", 2**61), *[Value("v", 2**60)] * 4)),
        "sum of the sizes",
    ),
    "sum of costs": (
        replace(GOOD, ops=tuple(replace(op, cost=2**60) for op in GOOD.ops)),
        "sum of the costs",
    ),
    "fractional cost": (with_op(0, cost=1.5), "cost of op 0 is 1.5"),
    "negative workspace": (with_op(0, workspace=-3), "workspace of op 0 is -3"),
    "input out of range": (with_op(0, inputs=(5,)), "inputs of op 0: 5 is not a value id"),
    "negative input": (with_op(0, inputs=(-1,)), "inputs of op 0: -1"),
    "output out of range": (with_op(3, outputs=(9,)), "outputs of op 3: 9"),
    "input twice": (with_op(3, inputs=(3, 0, 3)), "inputs of op 3: value 3 stands twice"),
    "resident twice": (replace(GOOD, resident=(0, 0)), "resident: value 0 stands twice"),
    "outputs out of range": (replace(GOOD, outputs=(7,)), "outputs: 7 is not a value id"),
    "no outputs": (with_op(0, outputs=()), "op 0 has no outputs"),
    "input is output": (with_op(1, inputs=(1, 2)), "value 2 is both an input and an output"),
    "resident produced": (replace(GOOD, resident=(0, 1)), "op 0 produces value 1, which is resid"),
    "two producers": (with_op(3, outputs=(1, 4)), "value 1 is produced by op 0 and again by op 3"),
    "no producer": (replace(GOOD, resident=()), "value 0 is neither resident nor produced"),
    "reads too early": (with_op(0, inputs=(0, 2)), "op 0 reads value 2 before op 1 produces it"),
    "unknown phase": (with_op(0, phase="warmup"), "phase of op 0 is 'warmup'"),
    "two losses": (with_op(0, phase="loss"), "ops 0 and 2 both have phase 'loss'"),
    "grad_of out of range": (with_op(3, grad_of=4), "grad_of of op 3 is 4"),
    "grad_of true": (with_op(3, grad_of=True), "grad_of of op 3 is True"),
    "held is no loss input": (replace(GOOD, held=(1,)), "value 1 is held but is not an input"),
    "held without loss": (with_op(2, phase=None), "value 2 is held"),
    "pinned to no gradient": (replace(OPAQUE, pinned=((1, 2),)), "names an op that is the grad"),
    "pinned, not once": (replace(GOOD, pinned=((0, 3),)), r"\[0, 3\] needs op 0 to run once"),
    "pinned, not read": (replace(OPAQUE, pinned=((2, 3),)), "op 0 does not read value 2"),
    "pinned value": (replace(OPAQUE, pinned=((9, 3),)), "pinned: 9 is not a value id"),
    "pinned op": (replace(OPAQUE, pinned=((0, 9),)), "pinned: 9 is not an op id"),
    "pinned twice": (replace(OPAQUE, pinned=((0, 3), (0, 3))), "a pair stands twice"),
    "pinned and moved": (
        replace(OPAQUE, pinned=((0, 3),), transfers=HostLink(1, 1, 0, 0)),
        "has one or the other",
    ),
    "inplace of unequal size": (with_size(2, 15), r"pair \[1, 2\] of op 1 has unequal sizes 16"),
    "inplace of others": (with_op(1, inplace=((3, 2),)), r"pair \[3, 2\] of op 1 is not an input"),
    "inplace resident": (with_op(3, inplace=((0, 4),)), "overwrites a resident value"),
    "inplace twice": (with_op(1, inplace=((1, 2), (1, 2))), "name a value twice"),
}


def test_good():
    check_problem(GOOD)
    check_schedule(GOOD, Schedule((0, 1, 0, 1, 2, 3)))
    check_problem(Problem((), ()))
    check_schedule(Problem((), ()), Schedule(()))


@pytest.mark.parametrize("case", BAD)
def test_bad_problem(case):
    problem, sentence = BAD[case]
    with pytest.raises(InvalidProblem, match=sentence):
        check_problem(problem)


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ((0, 2), "step 1 runs op 2 .'loss'., which reads value 2 .'y'. before"),
        ((0, 1, 2), "op 3 .'b'. must stand exactly once in the schedule and stands 0 times"),
        ((0, 1, 2, 2, 3), "op 2 .'loss'. must stand exactly once .* stands 2 times"),
        ((0, 4), "step 1 names op 4, and the problem has ops 0 to 3"),
        ((0, -1), "step 1 names op -1"),
        ((0, 2**40), "step 1 names op 1099511627776"),
        ((0, "1"), "step 1 names op 1"),
    ],
)
def test_bad_schedule(steps, sentence):
    with pytest.raises(InvalidSchedule, match=sentence):
        check_schedule(GOOD, Schedule(steps))


def test_missing_output():
    problem = Problem((Value("x", 1), Value("y", 1)), (Op("f", 1, (), (0,)), Op("g", 1, (), (1,))))
    check_schedule(problem, Schedule(()))
    with pytest.raises(InvalidSchedule, match=r"output value 1 .'y'. is never produced"):
        check_schedule(replace(problem, outputs=(1,)), Schedule((0,)))


def test_an_unchecked_problem_cannot_crash_the_native_core():
    """Whoever forgets check_problem gets an exception, not a read beyond an array."""
    for problem, _ in BAD.values():
        try:
            check_schedule(problem, Schedule((0, 1, 2, 3)))
        except (InvalidSchedule, ValueError, TypeError, IndexError):
            continue
