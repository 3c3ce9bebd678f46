import pytest

from rekindle.core import Op, Problem, Schedule, Value, keep_all, read_problem, simulate

KEEP_ALL_PEAKS = {
    "RL1": 46319,
    "RL2": 146840,
    "RL3": 284439,
    "RL4": 608619,
    "CM1": 13484795520,
    "CM2": 38059356160,
}


@pytest.mark.parametrize("name", KEEP_ALL_PEAKS)
def test_published_peaks(name, instances):
    problem = read_problem(instances / f"{name}.json")
    trace = simulate(problem, keep_all(problem))
    assert trace.peak == KEEP_ALL_PEAKS[name] == trace.memory[trace.peak_step]
    assert trace.cost == sum(op.cost for op in problem.ops)
    assert trace.runs == (1,) * len(problem.ops)
    assert trace.num_recomputed == 0


def test_empty():
    trace = simulate(Problem((), ()), Schedule(()))
    assert (trace.memory, trace.peak, trace.peak_step, trace.cost) == ((), 0, -1, 0)


def chain_of_four(**loss):
    """a -> b -> c -> d, sizes 1, 2, 4, 8; d is the output."""
    return Problem(
        values=tuple(Value(name, 1 << k) for k, name in enumerate("abcd")),
        ops=tuple(Op(f"op{k}", 10**k, (k - 1,) if k else (), (k,)) for k in range(4)),
        outputs=(3,),
    )


def test_by_hand():
    trace = simulate(chain_of_four(), Schedule((0, 1, 2, 0, 1, 2, 3, 0)))
    # The first c is never read: it lives during its own step. The last a neither.
    assert trace.memory == (1, 3, 6, 1, 3, 6, 12, 9)
    assert (trace.peak, trace.peak_step) == (12, 6)
    assert trace.cost == 2 * 111 + 1000 + 1
    assert trace.runs == (3, 2, 2, 1)
    assert trace.num_recomputed == 4


def test_a_kept_value_lives_to_its_last_use():
    # b is read at step 2 and again at step 4 (c is made twice), so it lives over step 3.
    trace = simulate(chain_of_four(), Schedule((0, 1, 2, 0, 2, 3)))
    assert trace.memory == (1, 3, 6, 3, 6, 12)


def held_problem(held):
    """x is read by the loss and by the backward; it may be held."""
    return Problem(
        values=(Value("x", 10), Value("g", 1), Value("gw", 2)),
        ops=(
            Op("f", 1, (), (0,), phase="forward"),
            Op("loss", 1, (0,), (1,), phase="loss"),
            Op("b", 1, (0, 1), (2,), phase="backward", grad_of=0),
        ),
        outputs=(2,),
        held=(0,) if held else (),
    )


def test_held_copy_lives_on_beside_a_new_one():
    again = Schedule((0, 1, 0, 2))
    assert simulate(held_problem(False), again).memory == (10, 11, 11, 13)
    assert simulate(held_problem(True), again).memory == (10, 11, 21, 23)
    assert simulate(held_problem(True), Schedule((0, 1, 2))).memory == (10, 11, 13)


def test_inplace_saves_only_where_the_input_dies():
    def problem(outputs):
        return Problem(
            values=(Value("x", 5), Value("y", 5), Value("z", 1)),
            ops=(
                Op("f", 1, (), (0,)),
                Op("relu", 1, (0,), (1,), workspace=3, inplace=((0, 1),)),
                Op("h", 1, (0, 1), (2,)),
            ),
            outputs=outputs,
        )

    assert simulate(problem((1,)), Schedule((0, 1))).memory == (5, 8)
    assert simulate(problem((0, 1)), Schedule((0, 1))).memory == (5, 13)
    assert simulate(problem((2,)), Schedule((0, 1, 2))).memory == (5, 13, 11)
    # x is made again before it is read: the copy that relu reads dies there.
    assert simulate(problem((2,)), Schedule((0, 1, 0, 2))).memory == (5, 8, 10, 11)
