"""A backward that the plan did not expect: other gradients arrive, in other layouts, or what the
forward left has been written over since. It begins with what the plan's forward has saved."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rekindle.capture import JointGraph
from rekindle.capture.node_facts import source_of
from rekindle.lower.emit import Stretch
from rekindle.lower.resumed_backward import emit_resumed
from rekindle.lower.step_emitter import Saved
from rekindle.program import Program, analyse
from rekindle.torch_compat import eager_kernels

if TYPE_CHECKING:
    from rekindle.runtime.changed_tensors import Changed
    from rekindle.runtime.runner import Runner, Step


class OtherBackward:
    """Exact, from what the plan's forward has saved. Where only layouts differ it is the same
    schedule. Else it is one stretch that brings back what it lacks, and is not held to the budget;
    the next forward is planned for it."""

    def __init__(
        self, runner: "Runner", joint: JointGraph, changed: "Changed | None" = None
    ) -> None:
        self.joint = joint
        self.stretch: Stretch | None = None
        self.twin: Runner | None = None
        program = runner.program
        if joint is not runner.joint:
            holds = program.held == program.given
            program = analyse(joint, hold_outputs=holds, random_once=runner.cuda_graph)
        # What the forward has left on the device, and behind it what is in host memory alone.
        available = (*runner.lowered.saved, *_hosted(runner))
        if changed is None:
            self.twin = _twin(runner, program)
            if self.twin is not None:
                return
            resumed = emit_resumed(program, available)
        else:
            resumed = emit_resumed(
                program,
                available,
                spoiled=changed.saved,
                changed=[source_of(runner.placeholders[p]) for p in changed.residents],
            )
        if resumed is None:
            if changed is not None:
                raise runner.changes.refusal(changed)
            same_outputs = {t.output for t in joint.tangents} == {
                t.output for t in runner.joint.tangents
            }
            if same_outputs and joint.autocast == runner.joint.autocast:
                return  # layouts alone differ: the same numbers can be laid out as planned
            arrived = [t.output for t in joint.tangents]
            planned = [t.output for t in runner.joint.tangents]
            raise RuntimeError(
                f"gradients arrived for outputs {arrived} of a managed module (inside autocast: "
                f"{bool(joint.autocast)}), its plan was made for outputs {planned} (inside "
                f"autocast: {bool(runner.joint.autocast)}), and what the forward saved is not "
                "enough for them; run this step again: the next step is planned for these gradients"
            )
        stretch, self.written = resumed
        self.stretch = stretch
        position = {n: i for i, n in enumerate(runner.placeholders)}
        self.residents = [
            (position[n], None) if n in position else (-1, joint.constants[source_of(n).index])
            for n in stretch.residents
        ]
        self.slots = [runner.internal.index(t.output) for t in joint.tangents]

    def backward(self, runner: "Runner", step: "Step", index: int) -> Sequence[Any]:
        """The gradients that leave with this stretch of the planned backward; all are made with the
        first."""
        if self.twin is not None:
            return self.twin.planned_backward(step, index)
        assert self.stretch is not None
        if index == 0:
            args = runner.take_saved(step, self.written)
            if step.moves is not None:
                # This code writes over what it likes, and is not held to the budget.
                step.moves.settle()
                hosted = runner.lowered.hosted
                args = args + step.moves.bring_back(each.slot for each in hosted)
            args += [step.tangents[slot] for slot in self.slots]
            step.tangents = []
            args += [step.residents[p] if p >= 0 else c for p, c in self.residents]
            args += step.sizes
            with eager_kernels():
                made = self.stretch.run(args)
            step.gradients = dict(zip(self.stretch.gradients, made, strict=True))
        return [step.gradients.pop(leaf, None) for leaf in runner.leaves[index]]


def _twin(runner: "Runner", program: Program) -> "Runner | None":
    """The same schedule over a program that differs in layouts alone, or None."""
    mine = runner.program
    same = len(program.ops) == len(mine.ops) and all(
        a.name == b.name
        and (a.inputs, a.outputs, a.recomputable) == (b.inputs, b.outputs, b.recomputable)
        for a, b in zip(program.ops, mine.ops, strict=True)
    )
    if not same:
        return None
    # Sizes of what it moves have to be the same, and those are the problem's.
    problem = None if runner.transfers is None else runner.problem
    twin = type(runner)(program, runner.schedule, runner.record_backward, problem=problem)
    fits = (
        twin.placeholders == runner.placeholders
        and twin.lowered.saved == runner.lowered.saved
        and twin.leaves == runner.leaves
        and twin.stretch_positions == runner.stretch_positions
        and twin.lowered.host == runner.lowered.host
    )
    return twin if fits else None


def _hosted(runner: "Runner") -> list[Saved]:
    values = runner.program.values
    return [
        Saved(root, values[each.value].state)
        for each in runner.lowered.hosted
        for root in each.roots
    ]


def layout(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides where they mean something."""
    return tuple([s if n > 1 else 0 for n, s in zip(shape, stride, strict=True)])


def laid_out(tensor: torch.Tensor, wanted: Sequence[int]) -> torch.Tensor:
    """The tensor in the layout that was planned; as it is where it has that."""
    if layout(tensor.shape, tensor.stride()) == tuple(wanted):
        return tensor
    stride = [s or 1 for s in wanted]
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
