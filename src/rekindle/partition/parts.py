"""Parts of a training step as problems of their own, in a form in which equal parts are equal.

`cut_part` takes a set of layers out of a problem. Ops and values are numbered by their place in the
part and have no names, so two parts that do the same work on values of the same sizes are equal as
`Problem`s, and a table finds them (HiRemate, C.1.1: the canonical form relies on the listed order,
so no graph isomorphism has to be solved). What is found for one is carried over by op numbers.

A part's problem: the forward ops, a loss op that stands for everything between the part's forward
and backward, and the backward ops. What the part reads from outside is always there and not
counted: forward values are resident, arriving gradients are made by the loss op with size 0. The
loss op reads all forward values that leave the part; the gradients that leave it are the outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core import Op, Problem, Value
from rekindle.partition.layer_graph import Layers


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a problem as a problem of its own, with the way back to the ids of the whole."""

    problem: Problem
    ops: tuple[int, ...]  # per op of the part: its id in the whole, -1 for the part's loss op
    values: tuple[int, ...]  # per value of the part: its id in the whole, -1 for the loss token
    # (op, input, output) in numbers of the part: in-place pairs whose input comes from outside,
    # which the part's problem leaves out since it does not know whether that input dies there.
    borrowed: tuple[tuple[int, int, int], ...] = ()

    @property
    def form(self) -> "Form":
        """Equal for parts that do the same work."""
        return self.problem, self.borrowed

    @property
    def forward_out(self) -> tuple[int, ...]:
        """The forward values that leave the part (numbers of the part)."""
        loss = self.problem.loss_op
        assert loss is not None
        return self.problem.ops[loss].inputs


Form = tuple[Problem, tuple[tuple[int, int, int], ...]]


def cut_part(problem: Problem, layers: Layers, members: Sequence[int]) -> Part:
    """The part that the layers `members` make up."""
    forward = sorted(layers.layers[j].forward for j in members)
    backward = sorted(i for j in members for i in layers.layers[j].backward)
    return cut_ops(problem, forward, backward)


def cut_ops(problem: Problem, forward: Sequence[int], backward: Sequence[int]) -> Part:
    """The part of these forward and backward ops, both in listed order."""
    inside = {*forward, *backward}
    cut = _Cut(problem, inside)
    steps = [cut.op(i) for i in forward]
    leaving = [v for i in forward for v in sorted(problem.ops[i].outputs) if cut.leaves(v)]
    # In the order in which the part's backward meets them, not by their ids in the whole: ids
    # differ between parts that are equal otherwise.
    arriving = [
        v
        for v in dict.fromkeys(v for i in backward for v in sorted(problem.ops[i].inputs))
        if cut.is_gradient(v) and problem.producer[v] not in inside
    ]
    # Made by others: the level above counts them.
    arrived = tuple(cut.value(v, size=0) for v in arriving)
    # Every op has an output by the format, and in some parts no gradient arrives.
    token = cut.token()
    loss = Op("", 0, tuple(cut.value(v) for v in leaving), (*arrived, token), phase="loss")
    steps += [loss, *(cut.op(i) for i in backward)]
    made = {v for op in steps for v in op.outputs}
    outputs = [cut.value(v) for i in inside for v in problem.ops[i].outputs if cut.must_stay(v, i)]
    part = Problem(
        values=tuple(Value("", size) for size in cut.sizes),
        ops=tuple(steps),
        resident=tuple(v for v in range(len(cut.sizes)) if v not in made),
        outputs=tuple(sorted(outputs)),
    )
    ops = (*forward, -1, *backward)
    borrowed = [
        (k, cut.local[v], cut.local[out])
        for k, i in enumerate(ops)
        if i >= 0
        for v, out in problem.ops[i].inplace
        if problem.producer[v] not in inside
    ]
    return Part(part, ops, tuple(cut.ids), tuple(borrowed))


class _Cut:
    """Numbers the values of a part in the order in which they are met."""

    def __init__(self, problem: Problem, inside: set[int]) -> None:
        self.problem = problem
        self.inside = inside
        self.final = set(problem.outputs)
        self.local: dict[int, int] = {}
        self.sizes: list[int] = []
        self.ids: list[int] = []

    def value(self, v: int, size: int | None = None) -> int:
        if v not in self.local:
            self.local[v] = len(self.ids)
            self.ids.append(v)
            # What comes from outside is always there for the part, so it has no size in it.
            counted = self.problem.producer[v] in self.inside
            whole = self.problem.values[v].size if counted else 0
            self.sizes.append(whole if size is None else size)
        return self.local[v]

    def token(self) -> int:
        self.ids.append(-1)
        self.sizes.append(0)
        return len(self.ids) - 1

    def is_gradient(self, v: int) -> bool:
        by = self.problem.producer[v]
        return by >= 0 and self.problem.ops[by].phase != "forward"

    def leaves(self, v: int) -> bool:
        return v in self.final or any(i not in self.inside for i in self.problem.readers[v])

    def must_stay(self, v: int, by: int) -> bool:
        if v in self.final:
            return True
        return self.problem.ops[by].phase == "backward" and self.leaves(v)

    def op(self, i: int) -> Op:
        op = self.problem.ops[i]
        # What is resident in the whole is always there, whoever reads it; the rest in the order in
        # which it is made, so that the order in which an op names its inputs does not matter.
        inputs = tuple(self.value(v) for v in sorted(op.inputs) if self.problem.producer[v] >= 0)
        outputs = tuple(self.value(v) for v in op.outputs)
        pairs = [
            (self.local[v], self.local[out])
            for v, out in op.inplace
            if self.problem.producer[v] in self.inside
        ]
        return Op(
            # Names and ids tell equal parts apart; so does `grad_of`, which nobody asks of a part.
            name="",
            cost=op.cost,
            inputs=inputs,
            outputs=outputs,
            workspace=op.workspace,
            recomputable=op.recomputable,
            inplace=tuple(pairs),
            phase=op.phase,
        )
