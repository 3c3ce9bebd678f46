"""A step that ran out of memory while it was watched is repeated exactly, by a plan with more room.

What a repetition needs is set aside at the step's begin: the random streams, and copies of the
residents that the step writes to. The forward is repeated from those; a backward is too, where it
runs out of memory: the forward again and the whole backward, from the gradients that had arrived.
Gradients that autograd has already are left out. Large gradients of outputs wait in host memory, so
that keeping them does not raise the peak that is being watched.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts
from rekindle.capture.op_effects import runs_once
from rekindle.lower.runtime_ops import generator_of
from rekindle.program import Program
from rekindle.runtime.changed_tensors import versions
from rekindle.torch_compat import backward_keeps_graph

if TYPE_CHECKING:
    from rekindle.runtime.runner import Runner, Step

_SMALL = 1 << 12  # bytes of a gradient that stays on the device
HINT = (
    "rekindle: a planned step ran out of device memory: something else takes what the budget "
    "counts on. Give a smaller budget, or plan with device_budget='auto'; there is less "
    "fragmentation with PYTORCH_ALLOC_CONF=expandable_segments:True"
)


class Rescue:
    """What one step needs to be repeated."""

    __slots__ = ("streams", "tangents", "written")

    def __init__(self, program: Program, written: Sequence[int], residents: list[torch.Tensor]):
        devices = {torch.device("cpu"), program.joint.device}
        generators = [*map(generator_of, devices), *own_generators(program)]
        self.streams = [(generator, generator.get_state()) for generator in generators]
        self.written = {i: residents[i].detach().clone() for i in written}
        self.tangents: list[Any] = []

    def keep_tangents(self, tangents: Sequence[Any]) -> None:
        """Sets the gradients aside that have arrived for outputs; large ones in host memory."""
        self.tangents = [
            t.cpu() if isinstance(t, torch.Tensor) and t.nbytes > _SMALL else t for t in tangents
        ]

    def restore(self, residents: list[torch.Tensor]) -> None:
        """Streams and residents as they were when the step began."""
        with torch.no_grad():
            for i, before in self.written.items():
                residents[i].copy_(before)
        for generator, state in self.streams:
            generator.set_state(state)

    def is_changed(self, step: "Step") -> bool:
        """Whether the forward, run again, would meet others than it met."""
        pairs = zip(versions(step.residents), step.versions, strict=True)
        return any(now != then for i, (now, then) in enumerate(pairs) if i not in self.written)

    def gradients(self, runner: "Runner", step: "Step") -> dict[fx.Node, Any]:
        """All gradients of the step, by another runner of the same graph. Nothing of the caller's
        changes: the forward's effects land in the copies, and streams go on where they are."""
        residents = list(step.residents)
        for i, before in self.written.items():
            residents[i] = before
        found: dict[fx.Node, Any] = {}
        now = [(generator, generator.get_state()) for generator, _ in self.streams]
        try:
            for generator, state in self.streams:
                generator.set_state(state)
            with torch.no_grad():
                again = type(step)(runner, residents, step.sizes)
                del runner.forward(again)[:]
                device = runner.device
                again.tangents = [
                    t.to(device) if isinstance(t, torch.Tensor) else t for t in self.tangents
                ]
                for index, leaves in enumerate(runner.leaves):
                    found.update(zip(leaves, runner.planned_backward(again, index), strict=True))
        finally:
            for generator, state in now:
                generator.set_state(state)
        return found


def runner_with_more_room(
    runner: "Runner", step: "Step", error: torch.OutOfMemoryError
) -> "Runner":
    """That of a plan which needs less than the device had for this step; the same one, outside of
    its arena. Raises the error where there is none, or where steps are not watched any more."""
    is_backward = bool(step.versions)
    was_inside, step.arena = step.arena is not None, None
    if was_inside and runner.arena is not None:
        runner.arena.give_up()
    is_watched = runner.watch is not None and runner.smaller_plan is not None
    if step.rescue is None or not (is_watched or was_inside):
        error.add_note(HINT)
        raise error
    if is_backward and (backward_keeps_graph() or step.other is not None):
        raise error
    if is_backward and any(runs_once(n.target) for op in runner.program.ops for n in op.nodes):
        error.add_note("rekindle: not repeated, since hooks of modules (or collectives) have run")
        raise error
    if is_backward and step.rescue.is_changed(step):
        error.add_note("rekindle: not repeated, since arguments or parameters were written to")
        raise error
    if was_inside:
        return runner
    assert runner.watch is not None
    assert runner.smaller_plan is not None
    plan = runner.smaller_plan(runner.watch.room_bytes())
    if plan is None:
        error.add_note(HINT)
        raise error
    runner.watch.abandon()
    runner.replacement = plan
    other: Runner = plan.runner
    return other


def repeat_forward(other: "Runner", step: "Step") -> list[Any]:
    """The outputs of the call, by another runner of the same graph."""
    assert step.rescue is not None
    step.rescue.restore(step.residents)
    empty_cache(other.device)
    return other(step.residents, step.holds, step.sizes)


def repeat_backward(runner: "Runner", other: "Runner", step: "Step", index: int) -> None:
    """Leaves in the step all gradients from this stretch on, made by another runner."""
    assert step.rescue is not None
    step.saved = step.env = None
    empty_cache(other.device)
    step.gradients = step.rescue.gradients(other, step)
    step.is_rescued = True
    for leaves in runner.leaves[:index]:  # autograd has those
        for leaf in leaves:
            step.gradients.pop(leaf, None)


def empty_cache(device: torch.device) -> None:
    """Gives back to a GPU what is free in the allocator's cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def written_residents(program: Program, placeholders: Sequence[fx.Node]) -> list[int]:
    """Positions of the placeholders whose tensors a step writes to."""
    nodes = [node for op in program.ops for node in op.nodes]
    storages = {facts(a).storage for node in nodes for a in facts(node).writes}
    return [i for i, node in enumerate(placeholders) if facts(node).storage in storages]


def own_generators(program: Program) -> list[torch.Generator]:
    """The generators of the model's own that its ops draw from."""
    found: list[torch.Generator] = []

    def look(value: Any) -> Any:
        if isinstance(value, torch.Generator) and value not in found:
            found.append(value)
        return value

    for op in program.ops:
        for node in op.nodes:
            fx.node.map_aggregate((node.args, node.kwargs), look)
    return found
