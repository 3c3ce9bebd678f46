"""Running a lowered plan under autograd.

One call is a chain of autograd Functions, linked by empty tensors:

    leaves of the last stretch -> [stretch n] -> link -> ... -> [stretch 1] -> link -> [outputs]

The forward code runs when the outputs are made. The backward goes the other way: each stretch
hands out the gradients that are finished, and the engine, which runs what accumulates a gradient
before anything else, stores them before the next stretch begins. What a call needs later travels
in a `Step`, reachable from the Functions alone: no reference cycle, and a step whose outputs are
dropped is freed at once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from rekindle.capture import JointGraph
from rekindle.lower.emit import Lowered
from rekindle.torch_compat import backward_keeps_graph, below_autograd, without_autocast


class Step:
    """What one forward leaves for its backward."""

    __slots__ = ("env", "residents", "saved", "tangents", "versions")

    def __init__(self, residents: list[torch.Tensor]) -> None:
        self.residents: list[torch.Tensor] = residents  # as `Runner.placeholders` counts
        self.saved: list[Any] | None = None  # what the forward carries over
        self.env: list[Any] | None = None  # what the stretch before carries over
        self.tangents: list[Any] = []
        self.versions: list[list[int]] = []


class Runner:
    """A lowered plan with the positions of everything it reads, ready to be called."""

    def __init__(self, joint: JointGraph, lowered: Lowered) -> None:
        self.joint = joint
        self.lowered = lowered
        self.device = joint.device
        self.placeholders: tuple[fx.Node, ...] = tuple(
            n
            for n in joint.graph.nodes
            if n.op == "placeholder" and n.meta["source"].kind != "tangent"
        )
        position = {n: i for i, n in enumerate(self.placeholders)}
        self.forward_positions = [position[n] for n in lowered.forward_residents]
        self.stretch_positions = [[position[n] for n in s.residents] for s in lowered.stretches]
        self.leaf_positions = [[position[n] for n in s.gradients] for s in lowered.stretches]
        self.internal = [i for i, n in enumerate(lowered.outputs) if n is not None]
        self.non_differentiable = [
            k for k, i in enumerate(self.internal) if not joint.differentiable[i]
        ]
        slot = {i: k for k, i in enumerate(self.internal)}
        self.tangent_slots = [slot[joint.tangents[t].output] for t in lowered.tangents]
        self.tangent_strides = [joint.tangents[t].stride for t in lowered.tangents]
        # What the caller could change before the backward: arguments, parameters, buffers.
        self.checked = [
            [p for p in positions if self.placeholders[p].meta["source"].kind != "constant"]
            for positions in self.stretch_positions
        ]

    def __call__(self, residents: list[torch.Tensor]) -> list[Any]:
        """The outputs that the graph makes, as `internal` counts them."""
        step = Step(residents)
        if not self.lowered.stretches:
            with torch.no_grad():
                return self.forward(step)
        link = torch.empty(0, device=self.device)
        for index in range(len(self.lowered.stretches) - 1, -1, -1):
            leaves = [residents[p] for p in self.leaf_positions[index]]
            link = _Stretch.apply(self, step, index, link, *leaves)
        outs = _Outputs.apply(self, step, link)
        return list(outs)

    def forward(self, step: Step) -> list[Any]:
        residents = step.residents
        args = [residents[p] for p in self.forward_positions]
        with below_autograd(), without_autocast():
            made = self.lowered.forward(args)
        num = len(self.internal)
        step.saved = made[num:]
        step.versions = [[residents[p]._version for p in checked] for checked in self.checked]
        return made[:num]

    def backward(self, step: Step, index: int) -> Sequence[Any]:
        stretch = self.lowered.stretches[index]
        if index == 0:
            args = self._take_saved(step, stretch.written)
        else:
            args = step.env  # type: ignore[assignment]
            step.env = None
        if args is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed). Specify retain_graph=True if you "
                "need to backward through the graph a second time."
            )
        residents = step.residents
        for p, version in zip(self.checked[index], step.versions[index], strict=True):
            if residents[p]._version != version:
                raise self._changed(p, residents[p], version)
        args += [residents[p] for p in self.stretch_positions[index]]
        with below_autograd(), without_autocast():
            made = stretch.run(args)
        num = len(stretch.gradients)
        step.env = made[num:]
        return made[:num]

    def _take_saved(self, step: Step, written: Sequence[int]) -> list[Any] | None:
        saved = step.saved
        if saved is None:
            return None
        tangents = self._tangents(step)
        if not backward_keeps_graph():
            step.saved = None
            step.tangents = []
            return saved + tangents
        kept = saved + tangents
        for p in written:  # a second backward must find it as it was
            kept[p] = kept[p].clone()
        return kept

    def _tangents(self, step: Step) -> list[Any]:
        found = []
        for slot, stride in zip(self.tangent_slots, self.tangent_strides, strict=True):
            tangent = step.tangents[slot]
            if tangent.stride() != stride:
                copy = torch.empty_strided(
                    tangent.shape, stride, dtype=tangent.dtype, device=tangent.device
                )
                tangent = copy.copy_(tangent)
            found.append(tangent)
        return found

    def _changed(self, p: int, tensor: torch.Tensor, version: int) -> RuntimeError:
        source = self.placeholders[p].meta["source"]
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {source.kind} {source.name} of shape {list(tensor.shape)} is at version "
            f"{tensor._version}; expected version {version} instead."
        )


class _Stretch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, runner: Runner, step: Step, index: int, link: torch.Tensor, *_leaves: Any
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call = (runner, step, index)
        return link.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        runner, step, index = ctx.call
        _refuse_double_backward()
        return (None, None, None, None, *runner.backward(step, index))


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runner: Runner, step: Step, _link: torch.Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.step = step
        # The tensors given out get a grad_fn that leads here: the step must not hold those.
        outs = tuple(out.detach() for out in runner.forward(step))
        ctx.mark_non_differentiable(*[outs[k] for k in runner.non_differentiable])
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_double_backward()
        ctx.step.tangents = list(grads)
        return None, None, None


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a managed module does not support double backward (create_graph=True): its backward "
            "is a fixed schedule without a graph of its own; call the original model for that"
        )
