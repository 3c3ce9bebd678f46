"""Node grouping (FastSA, Algorithm 1 and C.1): ops that are cheap to hold back join their readers.

An op whose outputs are at least as large as its inputs is better recomputed by whoever needs it: it
joins each of its readers, and the group runs as one op. As printed, Algorithm 1 joins an op to the
readers that read all of its outputs and then drops it, which loses an op whose outputs are read by
different readers. Here an op joins only if every reader reads all of its outputs, and never if it
must run once or makes an output, a held value, or nothing that is read.

The group's own memory (B.1) is counted from above: all inputs and outputs stay for its whole step,
what lives only inside is workspace. So a schedule of groups within a budget is, written out, a
schedule of ops within it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle import _native
from rekindle.core import Op, Problem


@dataclass(frozen=True, slots=True)
class Grouping:
    """A problem whose ops are groups of the ops of another."""

    problem: Problem  # its ops are groups
    members: tuple[tuple[int, ...], ...]  # per group: the ops it runs, in order

    @property
    def trivial(self) -> bool:
        return all(len(group) == 1 for group in self.members)

    def expand(self, problem: Problem, groups: Sequence[int]) -> list[int]:
        """The schedule of ops that a schedule of groups stands for."""
        ops = [i for g in groups for i in self.members[g]]
        return _native.drop_dead_runs(problem.native, ops)


def group_ops(problem: Problem, max_members: int = 48) -> Grouping:
    """`max_members` bounds what one recomputation may run: without it, a chain of ops that all may
    join would be run from its beginning by each of its readers."""
    # What the caller needs has to be there in its own right, not inside a group.
    fixed = {*problem.outputs, *problem.held}
    inputs = [set(op.inputs) for op in problem.ops]
    members: list[set[int]] = [{i} for i in range(len(problem.ops))]
    readers: list[set[int]] = [set() for _ in problem.values]
    for i, op in enumerate(problem.ops):
        for v in op.inputs:
            readers[v].add(i)
    gone = [False] * len(problem.ops)
    for i, op in enumerate(problem.ops):
        if op.once or not fixed.isdisjoint(op.outputs):
            continue
        joined = set().union(*(readers[v] for v in op.outputs))
        if not joined or any(not inputs[j].issuperset(op.outputs) for j in joined):
            continue
        # Algorithm 1's condition, by what the group reads from outside by now, not by what the op
        # itself reads: an op that joined before has already handed on its own inputs.
        if _size(problem, inputs[i]) > _size(problem, op.outputs):
            continue
        if any(len(members[i] | members[j]) > max_members for j in joined):
            continue
        gone[i] = True
        # `readers` says which groups read a value, so the op leaves it and its readers enter.
        for v in inputs[i]:
            readers[v].discard(i)
        # Each reader runs the op for itself: that is the recomputation which the group stands for.
        for j in joined:
            members[j] |= members[i]
            for v in inputs[j]:
                readers[v].discard(j)
            inputs[j] = _outer_inputs(problem, members[j])
            for v in inputs[j]:
                readers[v].add(j)
    return _write(problem, [(i, sorted(m)) for i, m in enumerate(members) if not gone[i]])


def _size(problem: Problem, values: "set[int] | tuple[int, ...]") -> int:
    """Model inputs and parameters count, as in the paper: to read much is not cheap to repeat."""
    return sum(problem.values[v].size for v in values)


def _outer_inputs(problem: Problem, ops: set[int]) -> set[int]:
    made = {v for i in ops for v in problem.ops[i].outputs}
    return {v for i in ops for v in problem.ops[i].inputs if v not in made}


def _write(problem: Problem, groups: list[tuple[int, list[int]]]) -> Grouping:
    """The problem whose ops are the groups, each named by the op that it is run for."""
    # Values that live only inside groups are no values of the grouped problem.
    used = sorted(
        {v for i, ops in groups for v in _outer_inputs(problem, set(ops))}
        | {v for i, _ in groups for v in problem.ops[i].outputs}
        | set(problem.resident)
    )
    new = {v: k for k, v in enumerate(used)}
    ops = []
    for i, group in groups:
        op = problem.ops[i]
        outer = sorted(_outer_inputs(problem, set(group)))
        single = len(group) == 1
        ops.append(
            Op(
                name=op.name,
                cost=sum(problem.ops[j].cost for j in group),
                inputs=tuple(new[v] for v in outer),
                outputs=tuple(new[v] for v in op.outputs),
                # A group has no in-place pairs: its inputs stay for its whole step, so none is
                # taken over.
                workspace=op.workspace if single else _inner_memory(problem, i, group),
                recomputable=op.recomputable,
                inplace=tuple((new[a], new[b]) for a, b in op.inplace) if single else (),
                phase=op.phase,
            )
        )
    grouped = Problem(
        values=tuple(problem.values[v] for v in used),
        ops=tuple(ops),
        resident=tuple(new[v] for v in problem.resident),
        outputs=tuple(new[v] for v in problem.outputs),
        held=tuple(new[v] for v in problem.held),
        name=problem.name,
    )
    return Grouping(grouped, tuple(tuple(group) for _, group in groups))


def _inner_memory(problem: Problem, last: int, group: list[int]) -> int:
    """The most that a group needs beyond its inputs and outputs, with all inputs kept."""
    outputs = set(problem.ops[last].outputs)
    # Members run in listed order, each once.
    made = {v: step for step, i in enumerate(group) for v in problem.ops[i].outputs}
    # What nothing inside reads dies at the step that makes it.
    last_use = dict(made)
    for step, i in enumerate(group):
        for v in problem.ops[i].inputs:
            if v in made:
                last_use[v] = step
    dying: list[int] = [0] * len(group)
    for v, step in last_use.items():
        if v not in outputs:
            dying[step] += problem.values[v].size
    live = most = 0
    for step, i in enumerate(group):
        op = problem.ops[i]
        live += sum(problem.values[v].size for v in op.outputs)
        most = max(most, live + op.workspace)
        live -= dying[step]
    # Outputs are counted by the simulator as outputs of the group, so they are taken off here.
    return max(0, most - sum(problem.values[v].size for v in outputs))
