"""Program + Schedule -> fx graphs: one for the forward, several for the backward.

Nodes are copied in schedule order, repeats included (`step_emitter`). The code of a graph drops a
name after its last use, so a copy of a value dies exactly where the simulation says. What a later
graph reads of an earlier one is carried in a list.

The backward is cut where parameters' gradients are done, since what one function of autograd
returns it returns at its end: in one piece, all gradients would stand beside each other there,
while eager adds each to `.grad` as it comes.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from rekindle.capture import op_effects
from rekindle.capture.node_facts import facts
from rekindle.core import HostLayout, Problem, Schedule, host_layout
from rekindle.core.schedule import Step
from rekindle.lower.fused_steps import joined_steps
from rekindle.lower.host_steps import Hosted
from rekindle.lower.lifetimes import lifetimes
from rekindle.lower.step_emitter import Emitter, Saved
from rekindle.program.program import Program
from rekindle.torch_compat import hint_of

NOTHING_MOVED = HostLayout()
_SHARE_BYTES = 1 << 16  # gradients below this in all are not worth a call of their own


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the backward: what it reads besides the carried list, and what leaves it."""

    run: Callable[[list[Any]], Any]  # (carried + residents) -> (gradients..., carried...)
    residents: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]  # placeholders whose gradients leave
    source: str
    carried: tuple[Saved, ...]  # what stands in the list that it begins with
    stop: int  # the step of the schedule that it ends before


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schedule as code: a function of the forward, and of each stretch of the backward."""

    forward: Callable[[list[Any]], Any]  # (residents) -> (outputs..., carried...)
    forward_residents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]  # per output of the graph; None: not from this graph
    tangents: tuple[int, ...]  # which tangents the backward reads, appended to the carried list
    stretches: tuple[Stretch, ...]
    saved: tuple[Saved, ...]  # what the first stretch begins with
    written: tuple[int, ...]  # positions of the saved list that the backward writes over
    forward_source: str
    # Of a schedule that moves values: where they lie in host memory, and which of them are there
    # alone when the forward ends. Each function then takes the step's transfers first.
    host: HostLayout = NOTHING_MOVED
    hosted: tuple[Hosted, ...] = ()


def emit(
    program: Program, schedule: Schedule, problem: Problem | None = None, max_stretches: int = 12
) -> Lowered:
    """`problem`: as the schedule was planned, by which steps may be joined."""
    steps = schedule.steps
    lives = lifetimes(program, steps)
    # Without a problem nothing is known of the peak, so only steps that need no more memory are
    # joined.
    joined = joined_steps(program, schedule, lives, problem)
    layout = host_layout(steps, _sizes(program, problem)) if schedule.transfers else NOTHING_MOVED
    replays = _last_replays(program, steps)
    emitter = Emitter(program, steps, lives, replays, joined=joined, layout=layout)
    emitter.begin()
    emitter.run(0, lives.loss_step)
    outputs = tuple([emitter.output(node) for node in program.joint.outputs])
    carried = emitter.carried(lives.loss_step + 1)
    forward, forward_source = emitter.end([n for n in outputs if n is not None], carried)
    residents = emitter.writer.residents
    # A forward under no_grad has no loss op: nothing is saved and there is no backward.
    if lives.loss_step == len(steps):
        return Lowered(forward, residents, outputs, (), (), (), (), forward_source, layout)
    hosted = emitter.host.hosted()
    saved = begins_with = tuple([emitter.saved(item) for item in carried])
    emitter.watch(carried)
    tangents = emitter.tangents_read()
    arriving: Sequence[int] = tangents
    stretches = []
    cuts = [*_cuts(emitter.leaves, lives.loss_step + 1, max_stretches), len(steps)]
    for begin, stop in itertools.pairwise(cuts):
        emitter.begin(carried, arriving)
        # Gradients of the outputs arrive once; later stretches find what they need of them carried.
        arriving = ()
        emitter.run(begin, stop)
        final = stop == len(steps)
        leaving = tuple(
            [n for n, t in emitter.leaves.items() if begin <= t < stop or (final and t >= stop)]
        )
        if max_stretches == 1:
            leaving = _as_they_arrived(program, leaving)
        gradients = [emitter.gradient(leaf) for leaf in leaving]
        carried = emitter.carried(stop)
        run, source = emitter.end(gradients, carried)
        residents_read = emitter.writer.residents
        stretches.append(Stretch(run, residents_read, leaving, source, begins_with, stop))
        begins_with = tuple([emitter.saved(item) for item in carried])
    return Lowered(
        forward,
        residents,
        outputs,
        tuple(tangents),
        tuple(stretches),
        saved,
        tuple(sorted(emitter.written)),
        forward_source,
        layout,
        hosted,
    )


def _as_they_arrived(program: Program, leaving: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """In the order in which eager's backward finishes them. Where a tensor is used in several
    places, each use has a gradient of its own, and autograd adds them in the order of this list."""
    entries = program.joint.entries
    place = {entries[i]: k for k, i in enumerate(program.joint.arrivals)}
    return tuple(sorted(leaving, key=lambda leaf: place.get(leaf, len(place))))


def _sizes(program: Program, problem: Problem | None) -> list[int]:
    """Per value: the bytes that it takes in host memory."""
    if problem is None:
        return [v.size_bytes for v in program.values]
    return [v.size for v in problem.values]


def _last_replays(program: Program, steps: Sequence[Step]) -> dict[fx.Node, int]:
    """Random op -> the last step that runs it again, where one does."""
    # Only ops that run more than once: a state is 5 kB on a CPU, and taking it costs a call.
    random = {
        i: [n for n in program.ops[i].nodes if op_effects.is_random(n.target)]
        for i, runs in Counter([i for i in steps if isinstance(i, int)]).items()
        if runs > 1
    }
    ran = [(t, i) for t, i in enumerate(steps) if isinstance(i, int)]
    return {node: t for t, i in ran for node in random.get(i, ())}


def _cuts(leaves: Mapping[fx.Node, int], begin: int, max_stretches: int) -> list[int]:
    """Steps at which a new stretch begins: gradients are handed out in about `max_stretches` equal
    shares of their bytes, none below a share that is worth the call."""
    sizes: dict[int, int] = {}
    for leaf, step in leaves.items():
        sizes[step] = sizes.get(step, 0) + hint_of(facts(leaf).storage_bytes)
    if not sizes:
        return [begin]
    # The largest gradient alone may be more than a share: cutting before it would not let it leave
    # any earlier.
    share = max(*sizes.values(), sum(sizes.values()) // max_stretches, _SHARE_BYTES)
    cuts, held = [begin], 0
    for step in sorted(sizes):
        held += sizes[step]
        if held >= share and step < max(sizes):
            cuts.append(step + 1)
            held = 0
    return cuts
