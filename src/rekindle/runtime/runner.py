"""Running a lowered plan under autograd.

One call is a chain of autograd Functions, linked by empty tensors:

    leaves of the last stretch -> [stretch n] -> link -> ... -> [stretch 1] -> link -> [outputs]

The forward code has run before. The backward goes the other way: each stretch
hands out the gradients that are finished, and the engine, which runs what accumulates a gradient
before anything else, stores them before the next stretch begins. What a call needs later travels
in a `Step`, reachable from the Functions alone: no reference cycle, and a step whose outputs are
dropped is freed at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rekindle.capture import JointGraph, Tangent
from rekindle.capture.autocast import autocast_state
from rekindle.capture.node_facts import source_of
from rekindle.core import Problem, Schedule
from rekindle.lower.emit import Stretch, emit
from rekindle.lower.guards import Guards
from rekindle.lower.resumed_backward import emit_resumed
from rekindle.program import Program, analyse
from rekindle.runtime.cuda_graphs import Graphs
from rekindle.runtime.rescue import (
    Rescue,
    repeat_backward,
    repeat_forward,
    runner_with_more_room,
    written_residents,
)
from rekindle.runtime.step_watch import Meter, StepWatch
from rekindle.torch_compat import (
    backward_keeps_graph,
    eager_kernels,
    outside_modes,
)

# The step of a joint graph with a backward for other gradients; its forward is the same, node by
# node.
RecordBackward = Callable[[JointGraph, Sequence[Tangent], tuple[Any, ...]], JointGraph]

# The plan of the same call for a limit in bytes, or None where there is none.
SmallerPlan = Callable[[int], Any]


class Step:
    """What one forward leaves for its backward."""

    __slots__ = (
        *("env", "gradients", "graphed", "is_rescued", "other", "rescue", "residents", "saved"),
        *("tangents", "versions"),
        "__weakref__",
    )

    def __init__(self, residents: list[torch.Tensor]) -> None:
        self.residents: list[torch.Tensor] = residents  # as `Runner.placeholders` counts
        self.saved: list[Any] | None = None  # what the forward carries over
        self.env: list[Any] | None = None  # what the stretch before carries over
        self.tangents: list[Any] = []
        self.other: _OtherBackward | None = None  # where other gradients arrived than planned
        self.gradients: dict[fx.Node, Any] = {}  # what that one has made
        self.versions: list[list[int]] = []
        self.graphed = False  # whether its forward was the replay of a CUDA graph
        self.rescue: Rescue | None = None  # while steps are watched
        self.is_rescued = False  # `gradients` has all that the backward would make


class Runner:
    """A lowered plan with the positions of everything it reads, ready to be called."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        record_backward: RecordBackward,
        cuda_graph: bool = False,
        guards: Guards | None = None,
        problem: Problem | None = None,
    ) -> None:
        joint, lowered = program.joint, emit(program, schedule, problem)
        self.program = program
        self.schedule = schedule
        self.joint = joint
        self.record_backward = record_backward
        self.lowered = lowered
        self.device = joint.device
        self.placeholders: tuple[fx.Node, ...] = tuple(
            n for n in joint.nodes if n.op == "placeholder" and source_of(n).kind != "tangent"
        )
        offset = len(joint.parameters)
        self.origins = [
            (0, s.index)
            if s.kind == "parameter"
            else (0, offset + s.index)
            if s.kind == "buffer"
            else (1, s.index)
            if s.kind == "input"
            else (2, s.index)
            for s in (source_of(n) for n in self.placeholders)
        ]
        position = {n: i for i, n in enumerate(self.placeholders)}
        self.guards = Guards(joint) if guards is None else guards
        position_of_source = {source_of(n): i for n, i in position.items()}
        self.guard_positions = [position_of_source[source] for source in self.guards.sources]
        self.forward_positions = [position[n] for n in lowered.forward_residents]
        self.stretch_positions = [[position[n] for n in s.residents] for s in lowered.stretches]
        self.leaves = [list(s.gradients) for s in lowered.stretches]
        if self.leaves:
            self.leaves[-1] += joint.idle
        self.leaf_positions = [[position[n] for n in leaves] for leaves in self.leaves]
        self.internal = [i for i, n in enumerate(lowered.outputs) if n is not None]
        self.non_differentiable = [
            k for k, i in enumerate(self.internal) if not joint.differentiable[i]
        ]
        slot = {i: k for k, i in enumerate(self.internal)}
        self.tangent_slots = [slot[joint.tangents[t].output] for t in lowered.tangents]
        self.layouts: tuple[Any, ...] = self._layouts(joint, slot)
        self.others: dict[tuple[Any, ...], _OtherBackward] = {}
        self.wanted: _OtherBackward | None = None  # what the last backward would have liked
        # What the caller could change before the backward: arguments, parameters, buffers.
        self.checked = [
            [p for p in positions if source_of(self.placeholders[p]).kind != "constant"]
            for positions in self.stretch_positions
        ]
        self.watch: StepWatch | None = None  # of the first steps
        self.written = written_residents(program, self.placeholders)
        self.smaller_plan: SmallerPlan | None = None  # for steps that run out of memory
        self.replacement: Any = None  # the plan that such a step was repeated by
        self.cuda_graph = cuda_graph
        self.graphs = Graphs(self) if cuda_graph and lowered.stretches else None

    def _layouts(self, joint: JointGraph, slot: Mapping[int, int]) -> tuple[Any, ...]:
        """Per output slot: the layout in which its gradient is assumed to arrive, or None."""
        found: list[Any] = [None] * len(slot)
        for tangent, like in zip(joint.tangents, joint.differentiated, strict=True):
            found[slot[tangent.output]] = _layout(like.shape, tangent.stride)
        return tuple(found)

    def gather(
        self, state: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Parameters and buffers, arguments and constants, as `placeholders` counts them."""
        return [
            state[i] if kind == 0 else tensors[i] if kind == 1 else self.joint.constants[i]
            for kind, i in self.origins
        ]

    def broken_assumption(
        self, state: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> str | None:
        """None, or which answer that Python got from the data at capture would differ now."""
        if self.guards.run is None:
            return None
        residents = self.gather(state, tensors)
        return self.guards.broken([residents[p] for p in self.guard_positions])

    def all_outputs(self, outs: list[Any], residents: Sequence[torch.Tensor]) -> list[Any]:
        """Per output tensor of the model; one that shows an argument is made by eager itself."""
        if len(outs) == len(self.joint.outputs):
            return outs
        found = dict(zip(self.internal, outs, strict=True))
        return [
            found[i] if i in found else self._shown(node, residents)
            for i, node in enumerate(self.joint.outputs)
        ]

    def _shown(self, node: fx.Node, residents: Sequence[torch.Tensor]) -> Any:
        if node.op == "placeholder":
            return residents[self.placeholders.index(node)]
        args = fx.node.map_arg(node.args, lambda a: self._shown(a, residents))
        return node.target(*args, **node.kwargs)

    def __call__(self, residents: list[torch.Tensor]) -> list[Any]:
        """The outputs that the graph makes, as `internal` counts them."""
        step = Step(residents)
        if self.watch is not None:
            self.watch.begin(step)
            step.rescue = Rescue(self.program, self.written, residents)
        other: Runner | None = None
        try:
            with torch.no_grad():
                outs = self.forward(step)
        except torch.OutOfMemoryError as error:
            other = runner_with_more_room(self, step, error)
        if other is not None:  # behind the except clause: what failed is free by now
            return repeat_forward(other, step)
        if not self.lowered.stretches:
            return outs
        if self.watch is not None:
            self.watch.reached(step, 0)
        # The chain is built while the device works.
        link = torch.empty(0, device=self.device)
        for index in range(len(self.lowered.stretches) - 1, -1, -1):
            leaves = [residents[p] for p in self.leaf_positions[index]]
            link = _Stretch.apply(self, step, index, link, *leaves)
        return list(_Outputs.apply(self, step, outs, link))

    def forward(self, step: Step) -> list[Any]:
        residents = step.residents
        outs = None if self.graphs is None else self.graphs.forward(step)
        if outs is None:
            args = [residents[p] for p in self.forward_positions]
            with eager_kernels():
                made: list[Any] = self.lowered.forward(args)
            num = len(self.internal)
            outs, step.saved = made[:num], made[num:]
        step.versions = [[residents[p]._version for p in checked] for checked in self.checked]
        return outs

    def backward(self, step: Step, index: int) -> Sequence[Any]:
        if step.other is not None:
            return step.other.backward(self, step, index)
        if step.is_rescued:
            return [step.gradients.pop(leaf, None) for leaf in self.leaves[index]]
        other: Runner | None = None
        try:
            gradients = self.planned_backward(step, index)
        except torch.OutOfMemoryError as error:
            other = runner_with_more_room(self, step, error)
        if other is not None:
            repeat_backward(self, other, step, index)
            return self.backward(step, index)
        if self.watch is not None:
            self.watch.reached(step, 2 + index)
        return gradients

    def watch_steps(self, limit_bytes: int, meter: Meter, num_corrections: int) -> None:
        """Watches whether the first steps stay within this limit."""
        loss = self.schedule.ops.index(
            next(i for i, o in enumerate(self.program.ops) if not o.nodes)
        )
        bounds = [0, loss, loss + 1, *(s.stop for s in self.lowered.stretches)]
        self.watch = StepWatch(bounds, limit_bytes, meter, num_corrections)

    def planned_backward(self, step: Step, index: int) -> Sequence[Any]:
        if step.graphed and self.graphs is not None:
            self.check_versions(step, index)
            gradients = self.graphs.backward(step, index)
            if gradients is not None:
                return self._with_idle(gradients, index)
        stretch = self.lowered.stretches[index]
        args: list[Any] | None
        if index == 0:
            args = self._take_saved(step, self.lowered.written)
            if args is not None:
                args += [step.tangents[slot] for slot in self.tangent_slots]
                step.tangents = []
        else:
            args, step.env = step.env, None
        if args is None:
            raise _second_backward()
        self.check_versions(step, index)
        residents = step.residents
        args += [residents[p] for p in self.stretch_positions[index]]
        with eager_kernels():
            made: list[Any] = stretch.run(args)
        num = len(stretch.gradients)
        step.env = made[num:]
        del made[num:]
        return self._with_idle(made, index)

    def _with_idle(self, made: list[Any], index: int) -> list[Any]:
        if index == len(self.leaves) - 1:
            made += [None] * len(self.joint.idle)
        return made

    def check_versions(self, step: Step, index: int) -> None:
        residents = step.residents
        for p, version in zip(self.checked[index], step.versions[index], strict=True):
            if residents[p]._version != version:
                raise self._changed(p, residents[p], version)

    def _take_saved(self, step: Step, written: Sequence[int]) -> list[Any] | None:
        saved = step.saved
        if saved is None:
            return None
        if not backward_keeps_graph():
            step.saved = None
            return saved
        kept = list(saved)
        for p in written:  # a second backward must find it as it was
            if p < len(kept):
                kept[p] = kept[p].clone()
        return kept

    def choose_backward(self, step: Step, grads: Sequence[Any]) -> None:
        """Looks at which gradients arrived, in which layout, and inside which autocast, before
        anything runs."""
        if self.watch is not None:
            self.watch.reached(step, 1)
        step.tangents = list(grads)
        layouts = tuple([None if g is None else _layout(g.shape, g.stride()) for g in grads])
        key = (layouts, autocast_state())
        if key == (self.layouts, self.joint.autocast):
            step.other = None
            if step.rescue is not None:
                step.rescue.keep_tangents(grads)
            return
        if key not in self.others:
            self.others[key] = self._other_backward(grads)
        other = self.others[key]
        self.wanted = other
        if self.watch is not None:
            self.watch.abandon()
        if other.stretch is None and other.twin is None:  # the planned backward, on copies
            step.other = None
            step.tangents = [
                g if g is None else _laid_out(g, layout)
                for g, layout in zip(grads, self.layouts, strict=True)
            ]
        else:
            step.other = other

    def _other_backward(self, grads: Sequence[Any]) -> "_OtherBackward":
        tangents = tuple(
            Tangent(self.internal[k], tuple(g.stride()))
            for k, g in enumerate(grads)
            if g is not None
        )
        joint = self.record_backward(self.joint, tangents, autocast_state())
        with outside_modes():  # lowering tries calls, which are no part of the step
            return _OtherBackward(self, joint)

    def _changed(self, p: int, tensor: torch.Tensor, version: int) -> RuntimeError:
        source = source_of(self.placeholders[p])
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: {source.kind} {source.name} of shape {list(tensor.shape)} is at version "
            f"{tensor._version}; expected version {version} instead."
        )


class _OtherBackward:
    """The backward for gradients that the plan did not expect: exact, from what the plan's forward
    has saved. Where only layouts differ it is the same schedule. Else it is one stretch that brings
    back what it lacks, and is not held to the budget; the next forward is planned for it."""

    def __init__(self, runner: Runner, joint: JointGraph) -> None:
        self.joint = joint
        holds = runner.program.held == runner.program.given
        program = analyse(joint, hold_outputs=holds, random_once=runner.cuda_graph)
        self.stretch: Stretch | None = None
        self.twin = _twin(runner, program)
        if self.twin is not None:
            return
        resumed = emit_resumed(program, runner.lowered.saved)
        if resumed is None:
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

    def backward(self, runner: Runner, step: Step, index: int) -> Sequence[Any]:
        if self.twin is not None:
            return self.twin.planned_backward(step, index)
        assert self.stretch is not None
        if index == 0:
            args = runner._take_saved(step, self.written)
            if args is None:
                raise _second_backward()
            for i in range(len(runner.checked)):
                runner.check_versions(step, i)
            args += [step.tangents[slot] for slot in self.slots]
            step.tangents = []
            args += [step.residents[p] if p >= 0 else c for p, c in self.residents]
            with eager_kernels():
                made = self.stretch.run(args)
            step.gradients = dict(zip(self.stretch.gradients, made, strict=True))
        return [step.gradients.pop(leaf, None) for leaf in runner.leaves[index]]


def _twin(runner: Runner, program: Program) -> Runner | None:
    """The same schedule over a program that differs in layouts alone, or None."""
    mine = runner.program
    same = len(program.ops) == len(mine.ops) and all(
        a.name == b.name
        and (a.inputs, a.outputs, a.recomputable) == (b.inputs, b.outputs, b.recomputable)
        for a, b in zip(program.ops, mine.ops, strict=True)
    )
    if not same:
        return None
    twin = Runner(program, runner.schedule, runner.record_backward)
    fits = (
        twin.placeholders == runner.placeholders
        and twin.lowered.saved == runner.lowered.saved
        and twin.leaves == runner.leaves
        and twin.checked == runner.checked
    )
    return twin if fits else None


def _layout(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides where they mean something."""
    return tuple([s if n > 1 else 0 for n, s in zip(shape, stride, strict=True)])


def _laid_out(tensor: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
    """The tensor in the layout that was planned; as it is where it has that."""
    if _layout(tensor.shape, tensor.stride()) == tuple(layout):
        return tensor
    stride = [s or 1 for s in layout]
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _second_backward() -> RuntimeError:
    return RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors "
        "after they have already been freed). Specify retain_graph=True if you need to backward "
        "through the graph a second time."
    )


class _Stretch(torch.autograd.Function):  # type: ignore[misc]
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


class _Outputs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, runner: Runner, step: Step, made: list[Any], _link: torch.Tensor
    ) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = (runner, step)
        # The tensors given out get a grad_fn that leads here: the step must not hold those.
        outs = tuple(out.detach() for out in made)
        ctx.mark_non_differentiable(*[outs[k] for k in runner.non_differentiable])
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_double_backward()
        runner, step = ctx.call
        runner.choose_backward(step, grads)
        return None, None, None, None


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a managed module does not support double backward (create_graph=True): its backward "
            "is a fixed schedule without a graph of its own; call the original model for that"
        )
