"""One level of a hierarchy: layers that run forward and backward, and a plan of what to run.

A layer (`Child`) is a part of the graph with the options to run it. `interface` says what it reads
and makes in terms of the whole problem's values, `lower_plan` turns a plan into op ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rekindle.partition.parts import Part
from rekindle.solve.hierarchy.options import Option


@dataclass(frozen=True, slots=True)
class Child:
    """A layer of the level: its part, the ways to run it, and its forward with nothing kept."""

    part: Part
    options: tuple[Option, ...]
    bare: Option


@dataclass(frozen=True, slots=True)
class Level:
    """Layers in an order in which they can run, in the value ids of the whole problem."""

    children: tuple[Child, ...]
    size: Mapping[int, int]  # bytes of the values that layers of this level (or the loss) make
    loss_reads: frozenset[int]
    loss_makes: frozenset[int] = frozenset()
    loss_workspace: int = 0
    final: frozenset[int] = frozenset()  # there at the end
    held: frozenset[int] = frozenset()  # there from the loss to the end


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run: (layer, option), option -1 being the bare forward."""

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int, bool], ...]  # (layer, option, whether it is the backward)
    # Of H-ILP, in the problem's unit; what is lowered costs less where dead runs fall away.
    cost: float


@dataclass(slots=True)
class Interface:
    """The interface of a child in global value ids."""

    makes: tuple[int, ...]
    reads: frozenset[int]  # by any of its forwards
    backward_reads: tuple[frozenset[int], ...]  # per option: forward values, own outputs included
    grads_in: frozenset[int]
    grads_out: frozenset[int]


def lower_plan(level: Level, plan: Plan) -> tuple[list[int], list[int]]:
    """The op ids of the whole problem that the plan runs before and after the loss. Of a run-once
    op the first run stands: where it would run again, what it made is still there (`runs_once`)."""
    done: set[int] = set()

    def ops(child: Child, numbers: Sequence[int]) -> list[int]:
        runs: list[int] = []
        for i in numbers:
            if child.part.problem.ops[i].once:
                if child.part.ops[i] in done:
                    continue
                done.add(child.part.ops[i])
            runs.append(child.part.ops[i])
        return runs

    forward: list[int] = []
    for k, o in plan.forward:
        child = level.children[k]
        forward += ops(child, (child.bare if o < 0 else child.options[o]).forward)
    backward: list[int] = []
    for k, o, is_backward in plan.backward:
        child = level.children[k]
        option = child.bare if o < 0 else child.options[o]
        backward += ops(child, option.backward if is_backward else option.forward)
    return forward, backward


def runs_once(child: Child) -> bool:
    """Whether the forward cannot run again: a run-once op makes what is read and does not stay
    (what has no size stays for free)."""
    problem = child.part.problem
    stays = set(problem.outputs)
    return any(
        v not in stays and problem.values[v].size and problem.readers[v]
        for i in child.bare.forward
        if problem.ops[i].once
        for v in problem.ops[i].outputs
    )


def interface(child: Child, level: Level) -> Interface:
    """What a child reads of the level, and what it gives to it."""
    part, ids = child.part, child.part.values
    problem = part.problem
    loss = problem.loss_op
    assert loss is not None
    # Over all options: what only one of them reads is asked for whichever runs, which is safe.
    inside = {i for o in (*child.options, child.bare) for i in o.forward}
    reads = {
        ids[v]
        for i in inside
        for v in problem.ops[i].inputs
        if v in set(problem.resident) and ids[v] in level.size
    }
    gradients = [v for i in range(loss + 1, len(problem.ops)) for v in problem.ops[i].outputs]
    leaving = set(problem.outputs)
    return Interface(
        makes=tuple(ids[v] for v in part.forward_out),
        reads=frozenset(reads),
        backward_reads=tuple(
            frozenset(ids[v] for v in (*o.backward_reads, *o.kept_outputs) if ids[v] in level.size)
            for o in child.options
        ),
        grads_in=frozenset(ids[v] for v in problem.ops[loss].outputs if ids[v] in level.size),
        grads_out=frozenset(ids[v] for v in gradients if v in leaving),
    )
