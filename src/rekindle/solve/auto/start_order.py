"""The order of the ops that a search begins from.

Save sets and eviction policies choose what is kept, not what runs first. While all that the
forward makes can go and come back, the listed order serves as well as any. Where the budget is so
small that not even the gradients fit beside one op, it does not: they would have to be made twice,
and an order that makes them later, or uses them sooner, needs less of that.
"""

from dataclasses import dataclass, replace

from rekindle import _native
from rekindle.core import Problem, Schedule, simulate
from rekindle.solve.anneal.fastsa import LARGE, MAX_WIDTH


@dataclass(frozen=True, slots=True)
class Order:
    """An order of all ops with a small peak."""

    ops: list[int]  # every op once
    tightest: int | None = None  # where gradients alone do not fit: the op beside most of them


def order_for(problem: Problem, budget: int, time_limit_s: float) -> Order:
    """As listed, or, where gradients alone are above the budget then, in the order that is found to
    need the least for them."""
    listed = list(range(len(problem.ops)))
    # Without a loss there are no gradients to speak of; beyond LARGE the search over sets of ops
    # takes longer than it brings.
    if problem.loss_op is None or len(listed) > LARGE:
        return Order(listed)
    bare = gradients_alone(problem, problem.loss_op)
    if simulate(bare, Schedule(tuple(listed))).peak <= budget:
        return Order(listed)
    ops, _, _, interrupted = _native.smallest_order(
        bare.native, listed, budget, MAX_WIDTH, MOST_SETS, time_limit_s
    )
    if interrupted:
        raise KeyboardInterrupt
    trace = simulate(bare, Schedule(tuple(ops)))
    return Order(ops, ops[trace.peak_step] if trace.peak > budget else None)


def gradients_alone(problem: Problem, loss_op: int) -> Problem:
    """The problem with what the forward makes in memory only beside the ops that use it."""
    kept = {*problem.resident, *problem.outputs, *problem.held}
    freed = {
        v for op in problem.ops[:loss_op] if op.recomputable for v in op.outputs if v not in kept
    }
    sizes = [value.size for value in problem.values]

    def beside(op_id: int) -> int:
        op = problem.ops[op_id]
        # What is freed has no size of its own any more, so that it stands in nobody's way; beside
        # the op that makes or reads it, its bytes are workspace.
        used = sum(sizes[v] for v in {*op.inputs, *op.outputs} & freed)
        return used - sum(sizes[out] for into, out in op.inplace if freed & {into, out})

    return replace(
        problem,
        values=tuple(
            replace(value, size=0) if v in freed else value
            for v, value in enumerate(problem.values)
        ),
        ops=tuple(
            replace(
                op,
                workspace=max(0, op.workspace + beside(i)),
                inplace=tuple(pair for pair in op.inplace if not freed & {*pair}),
            )
            for i, op in enumerate(problem.ops)
        ),
    )


MOST_SETS = 200_000  # of ops that have run, looked at in all: a fraction of a second
