"""The backward of one plan after the forward of another.

Where other gradients arrive than a plan expects, its forward has run already. The backward for
those begins with what that forward has saved, and recomputes what it lacks.
"""

from collections.abc import Collection, Sequence

from torch import fx

from rekindle.capture import op_effects
from rekindle.capture.node_facts import Source, facts, source_of
from rekindle.lower.emit import Stretch
from rekindle.lower.lifetimes import lifetimes
from rekindle.lower.step_emitter import Carried, Emitter, Saved
from rekindle.program.program import Program


def emit_resumed(
    program: Program,
    saved: Sequence[Saved],
    spoiled: Collection[int] = (),
    changed: Collection[Source] = (),
) -> tuple[Stretch, tuple[int, ...]] | None:
    """The whole backward of a program in one stretch, which begins with the saved list of another
    plan with the same forward and all tangents, and which of that list it writes over; None where
    the list does not suffice. `spoiled`: positions in the list, and `changed`: what comes from
    outside, that do not hold any more what the forward left there."""
    value_of = {(v.storage, v.state): i for i, v in enumerate(program.values) if not v.resident}
    values = [
        None
        if entry.state < 0 or position in spoiled
        else value_of.get((facts(entry.node).storage, entry.state))
        for position, entry in enumerate(saved)
    ]
    there = [v for v in values if v is not None]
    states = {entry.node for entry in saved if entry.state < 0}
    steps = _steps(program, set(there), states, _residents_left(program, changed))
    if steps is None:
        return None
    forward = {i for i, op in enumerate(program.ops) if op.phase == "forward"}
    replays = {n: t for t, i in enumerate(steps) for n in program.ops[i].nodes if n in states}
    lives = lifetimes(program, steps, there)
    emitter = Emitter(program, steps, lives, replays, seen=forward)
    carried = [
        Carried(entry.node, None)
        if entry.state < 0
        else None
        if value is None
        else Carried(entry.node, lives.started[value])
        for entry, value in zip(saved, values, strict=True)
    ]
    emitter.watch(carried)
    emitter.begin(carried, list(emitter.tangents))
    for t in range(1, len(steps)):
        emitter.step(t)
    run, source = emitter.end([emitter.gradient(leaf) for leaf in emitter.leaves])
    leaves, begins_with = tuple(emitter.leaves), tuple(saved)
    stretch = Stretch(run, emitter.writer.residents, leaves, source, begins_with, len(steps))
    return stretch, tuple(sorted(emitter.written))


def _residents_left(program: Program, changed: Collection[Source]) -> set[int]:
    """The values from outside that are what they were in the forward."""
    written = {
        facts(node).storage
        for node in program.joint.nodes
        if node.op == "placeholder" and source_of(node) in changed
    }
    return {v for v, value in enumerate(program.values) if value.resident} - {
        v for v, value in enumerate(program.values) if value.storage in written
    }


def _steps(
    program: Program, there: set[int], states: set[fx.Node], residents: set[int]
) -> tuple[int, ...] | None:
    """The loss and the backward in the listed order, each op preceded by what it lacks."""
    producer = {v: i for i, op in enumerate(program.ops) for v in op.outputs}
    loss = next(i for i, op in enumerate(program.ops) if op.phase == "loss")
    there = there | {v for v, value in enumerate(program.values) if value.storage is None}
    there |= residents
    there |= set(program.ops[loss].outputs)
    steps = [loss]
    for i, op in enumerate(program.ops):
        stack = [i] if op.phase == "backward" else []
        while stack:
            top = program.ops[stack[-1]]
            missing = [v for v in top.inputs if v not in there]
            if any(v not in producer for v in missing):
                return None  # from outside, and changed since
            if missing:
                stack += [producer[v] for v in missing]
                # Each op is waited for a few times at most: a deeper stack goes round in circles.
                if len(stack) > len(program.ops) * 4:
                    return None
                continue
            now = stack.pop()
            if now != i and all(v in there for v in top.outputs):
                continue
            random = [n for n in top.nodes if op_effects.is_random(n.target)]
            # What must run once has run; a random op can only be replayed from a state that was
            # saved.
            if top.phase == "forward" and (
                not top.recomputable or any(n not in states for n in random)
            ):
                return None
            steps.append(now)
            there |= set(top.outputs)
    return tuple(steps)
