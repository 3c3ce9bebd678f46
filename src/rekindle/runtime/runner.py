"""Running a lowered plan under autograd.

One call is a chain of autograd Functions, linked by empty tensors:

    leaves of the last stretch -> [stretch n] -> link -> ... -> [stretch 1] -> link -> [outputs]

The forward code has run before. The backward goes the other way: each stretch
hands out the gradients that are finished, and the engine, which runs what accumulates a gradient
before anything else, stores them before the next stretch begins. What a call needs later travels
in a `Step`, reachable from the Functions alone: no reference cycle, and a step whose outputs are
dropped is freed at once.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rekindle.capture import JointGraph, Tangent
from rekindle.capture.autocast import autocast_state
from rekindle.capture.changing_sizes import Sizes, stride_like, strides_key
from rekindle.capture.node_facts import facts, source_of
from rekindle.core import Problem, Schedule
from rekindle.errors import PlanMismatch
from rekindle.lower.codegen import name_line
from rekindle.lower.emit import emit
from rekindle.lower.guards import Guards
from rekindle.program import Program
from rekindle.runtime.arena import Arena, ArenaUse, inside
from rekindle.runtime.changed_tensors import Changed, Changes
from rekindle.runtime.cuda_graphs import Graphs
from rekindle.runtime.other_gradients import OtherBackward, laid_out, layout
from rekindle.runtime.rescue import (
    Rescue,
    repeat_backward,
    repeat_forward,
    runner_with_more_room,
    written_residents,
)
from rekindle.runtime.retained_gradients import without_retained
from rekindle.runtime.step_watch import Meter, StepWatch
from rekindle.runtime.transfers import Moves, Transfers
from rekindle.torch_compat import (
    backward_keeps_graph,
    compiled_kernels,
    eager_kernels,
    outside_modes,
)

ALIGNMENT = 16  # bytes, of what compiled kernels read

_MOST_LAYOUTS = 1024  # that are remembered, where sizes change

# The step of a joint graph with a backward for other gradients; its forward is the same, node by
# node.
RecordBackward = Callable[
    [JointGraph, Sequence[Tangent], tuple[Any, ...], tuple[int, ...]], JointGraph
]

# The plan of the same call for a limit in bytes, or None where there is none.
SmallerPlan = Callable[[int], Any]


class Step:
    """What one forward leaves for its backward."""

    __slots__ = (
        *("_runner", "arena", "env", "given", "gradients", "graphed", "holds", "is_rescued"),
        *("moves", "moving", "other", "rescue", "residents", "retained", "saved", "sizes"),
        *("tangents", "versions", "watches"),
        "__weakref__",
    )

    def __init__(self, runner: "Runner", residents: list[torch.Tensor], sizes: Sizes = ()) -> None:
        self._runner: Runner | None = runner
        self.sizes = sizes  # of this call, where sizes change from call to call
        self.residents: list[torch.Tensor] = residents  # as `Runner.placeholders` counts
        self.saved: list[Any] | None = None  # what the forward carries over
        self.env: list[Any] | None = None  # what the stretch before carries over
        self.tangents: list[Any] = []
        self.other: OtherBackward | None = None  # where it is not the planned backward
        self.gradients: dict[fx.Node, Any] = {}  # what that one has made
        self.versions: list[int] = []  # of the residents, when the forward ended
        self.watches: list[tuple[torch.Tensor, int]] = []  # see `Changes`
        self.given: list[weakref.ref[torch.Tensor]] = []  # what the caller got
        self.retained: dict[int, torch.Tensor] = {}  # the whole gradients of outputs, by slot
        self.graphed = False  # whether its forward was the replay of a CUDA graph
        self.rescue: Rescue | None = None  # while steps are watched
        self.arena: Arena | None = None  # what it allocates from
        # Raises where what Python reads in the backward has changed; None: it reads nothing.
        self.holds: Callable[[], None] | None = None
        self.is_rescued = False  # `gradients` has all that the backward would make
        self.moves: Moves | None = None  # what the step has in host memory
        self.moving: Moves | None = None  # the same, of the backward that runs

    @property
    def runner(self) -> "Runner":
        """The plan that runs this step; none once its backward is over."""
        if self._runner is None:
            raise _second_backward()
        return self._runner

    def release(self) -> None:
        """The backward is over: a loss that is kept must keep neither its batch nor its plan."""
        self._runner = None
        self.residents, self.saved, self.env, self.tangents = [], None, None, []
        self.other, self.gradients, self.versions, self.watches = None, {}, [], []
        self.rescue = self.arena = self.holds = None
        self.end_moves()

    def end_moves(self) -> None:
        """What is on its way arrives before anything that follows; host memory is given back."""
        moving, self.moving = self.moving, None
        moves, self.moves = self.moves, None
        for each in (moving, moves):
            if each is not None:
                each.close()


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
        arena: ArenaUse | None = None,
        max_stretches: int = 12,
    ) -> None:
        if cuda_graph and schedule.transfers:
            raise ValueError("a plan that moves values to the host cannot run as a CUDA graph")
        joint = program.joint
        lowered = emit(program, schedule, problem, max_stretches)
        self.program = program
        self.schedule = schedule
        self.joint = joint
        self.problem = problem
        self.record_backward = record_backward
        self.lowered = lowered
        self.device = joint.device
        self.placeholders: tuple[fx.Node, ...] = tuple(
            n for n in joint.nodes if n.op == "placeholder" and source_of(n).kind != "tangent"
        )
        entry = {n: i for i, n in enumerate(joint.entries) if n is not None}
        self.origins = [
            (True, entry[n]) if n in entry else (False, source_of(n).index)
            for n in self.placeholders
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
        self.leaf_positions = [
            [position[n] for n in leaves if n in position] for leaves in self.leaves
        ]
        self.internal = [i for i, n in enumerate(lowered.outputs) if n is not None]
        self.non_differentiable = [
            k for k, i in enumerate(self.internal) if not joint.differentiable[i]
        ]
        slot = {i: k for k, i in enumerate(self.internal)}
        # Outputs that may get their whole gradient from the plan, where they stand for it.
        self.slot_of_output = {joint.outputs[i]: k for k, i in enumerate(self.internal)}
        self.tangent_slots = [slot[joint.tangents[t].output] for t in lowered.tangents]
        self.layouts: tuple[Any, ...] = self._layouts(joint, slot)
        self.layouts_at: dict[Sizes, tuple[Any, ...]] = {}  # where sizes change
        self.others: dict[tuple[Any, ...], OtherBackward] = {}
        self.wanted: OtherBackward | None = None  # what the last backward would have liked
        self.changes = Changes(self)
        self.watch: StepWatch | None = None  # of the first steps
        self.written = written_residents(program, self.placeholders)
        self.smaller_plan: SmallerPlan | None = None  # for steps that run out of memory
        self.replacement: Any = None  # the plan that is to run in the place of this one
        link = None if problem is None else problem.transfers
        self.transfers = (
            Transfers(lowered.host, self.device, None if link is None else link.host_budget)
            if lowered.host.slots
            else None
        )
        self.arena = arena
        self.kernels: Callable[[], Any] = eager_kernels
        if joint.kernels != "eager" and self.device.type == "cuda":
            # Compiled kernels are launched on the current device, wherever their arguments are.
            self.kernels = functools.partial(compiled_kernels, self.device)
        self.cuda_graph = cuda_graph
        self.graphs = Graphs(self) if cuda_graph and lowered.stretches else None

    def _layouts(self, joint: JointGraph, slot: Mapping[int, int]) -> tuple[Any, ...]:
        """Per output slot: the layout in which its gradient is assumed to arrive, or None."""
        found: list[Any] = [None] * len(slot)
        for tangent, like in zip(joint.tangents, joint.differentiated, strict=True):
            shown = (like.shape, tangent.stride)
            # Where sizes change, `expected_layouts` computes it for each call's.
            found[slot[tangent.output]] = layout(*shown) if joint.changing is None else shown
        return tuple(found)

    def expected_layouts(self, step: Step) -> tuple[Any, ...]:
        """Per output slot: the layout in which its gradient is assumed to arrive, or None."""
        changing = self.joint.changing
        if changing is None:
            return self.layouts
        found = self.layouts_at.get(step.sizes)
        if found is None:
            at = changing.at(step.sizes)
            found = tuple([shown and layout(*at.numbers(shown)) for shown in self.layouts])
            if len(self.layouts_at) >= _MOST_LAYOUTS:
                self.layouts_at.clear()
            self.layouts_at[step.sizes] = found
        return found

    def gather(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inputs of the call's graph and constants, as `placeholders` counts them."""
        return [inputs[i] if given else self.joint.constants[i] for given, i in self.origins]

    def broken_assumption(self, residents: Sequence[torch.Tensor], sizes: Sizes = ()) -> str | None:
        """None, or which answer that Python got from the data at capture would differ now."""
        if self.kernels is not eager_kernels and any(t.data_ptr() % ALIGNMENT for t in residents):
            return f"a tensor lies at an address that is no multiple of {ALIGNMENT} bytes"
        if self.guards.run is None:
            return None
        return self.guards.broken([residents[p] for p in self.guard_positions], sizes)

    def all_outputs(
        self, outs: list[Any], residents: Sequence[torch.Tensor], sizes: Sizes = ()
    ) -> list[Any]:
        """Per output tensor of the model; one that shows an argument is made by eager itself."""
        if len(outs) == len(self.joint.outputs):
            return outs
        found = dict(zip(self.internal, outs, strict=True))
        return [
            found[i] if i in found else self._shown(node, residents, sizes)
            for i, node in enumerate(self.joint.outputs)
        ]

    def _shown(self, node: fx.Node, residents: Sequence[torch.Tensor], sizes: Sizes) -> Any:
        if node.op == "placeholder":
            return residents[self.placeholders.index(node)]
        args = fx.node.map_arg(node.args, lambda a: self._shown(a, residents, sizes))
        if self.joint.changing is not None:
            args = self.joint.changing.at(sizes).numbers(args)
        return node.target(*args, **node.kwargs)

    def __call__(
        self,
        residents: list[torch.Tensor],
        holds: Callable[[], None] | None = None,
        sizes: Sizes = (),
    ) -> list[Any]:
        """The outputs that the graph makes, as `internal` counts them. `holds` is asked when the
        backward begins; `sizes` are the call's, where they change from call to call."""
        step = Step(self, residents, sizes)
        step.holds = holds
        if self.watch is not None:
            self.watch.begin(step)
        if self.arena is not None:
            step.arena = self.arena.begin(is_watched=self.watch is not None)
        if self.watch is not None or (self.arena is not None and self.arena.is_checked_now):
            step.rescue = Rescue(self.program, self.written, residents)
        other: Runner | None = None
        with torch.no_grad():
            try:
                outs = self.forward(step)
            except torch.OutOfMemoryError as error:
                name_line(error)
                other = runner_with_more_room(self, step, error)
            except Exception as error:
                name_line(error)
                raise
        if other is not None:  # behind the except clause: what failed is free by now
            return repeat_forward(other, step)
        with torch.no_grad():
            self.changes.count_writes(residents)
        if not self.lowered.stretches:
            return self.changes.share_counters(outs)
        if self.watch is not None:
            self.watch.reached(step, 0)
        # The chain is built while the device works.
        link = torch.empty(0, device=self.device)
        self.changes.begin(step, outs, link)
        for index in range(len(self.lowered.stretches) - 1, -1, -1):
            leaves = [residents[p] for p in self.leaf_positions[index]]
            link = _Stretch.apply(step, index, link, *leaves)
        given = list(_Outputs.apply(step, outs, link))
        self.changes.watch_inner(given)
        for i in self.joint.marked:
            given[self.internal.index(i)].retain_grad()
        return given

    def forward(self, step: Step) -> list[Any]:
        """Runs the code of the forward; what the backward needs of it is left in the step."""
        residents = step.residents
        outs = None if self.graphs is None else self.graphs.forward(step)
        if outs is None:
            args: list[Any] = [residents[p] for p in self.forward_positions]
            args += step.sizes
            if self.transfers is not None:
                step.moves = self.transfers.begin()
                args.insert(0, step.moves)
            try:
                with inside(step.arena), self.kernels():
                    made: list[Any] = self.lowered.forward(args)
            except BaseException:
                step.end_moves()
                raise
            num = len(self.internal)
            outs, step.saved = made[:num], made[num:]
            if not self.lowered.stretches:
                step.end_moves()
        return outs

    def backward(self, step: Step, index: int) -> Sequence[Any]:
        """Runs one stretch of the backward: the gradients of its leaves, in their order."""
        if index > 0:
            if not step.versions:
                raise _second_backward()
            self.changes.check_later(step, index)
        done = False
        try:
            gradients = without_retained(self, step, index, self._gradients(step, index))
            done = index < len(self.leaves) - 1
            return gradients
        except Exception as error:
            name_line(error)
            raise
        finally:
            # After the last stretch, or an error in any.
            if not done and not backward_keeps_graph():
                step.release()

    def _gradients(self, step: Step, index: int) -> Sequence[Any]:
        if step.other is not None:
            return step.other.backward(self, step, index)
        if not step.is_rescued:
            try:
                gradients = self.planned_backward(step, index)
            except torch.OutOfMemoryError as error:
                other = runner_with_more_room(self, step, error)
                step.end_moves()
            else:
                if self.watch is not None:
                    self.watch.reached(step, 2 + index)
                return gradients
            repeat_backward(self, other, step, index)
        return [step.gradients.pop(leaf, None) for leaf in self.leaves[index]]

    def watch_steps(self, limit_bytes: int, meter: Meter, num_corrections: int) -> None:
        """Watches whether the first steps stay within this limit."""
        loss = self.schedule.steps.index(
            next(i for i, o in enumerate(self.program.ops) if not o.nodes)
        )
        bounds = [0, loss, loss + 1, *(s.stop for s in self.lowered.stretches)]
        self.watch = StepWatch(bounds, limit_bytes, meter, num_corrections)

    def _take_another_way(self, step: Step) -> None:
        """This backward is not the one that is watched, and that could be repeated."""
        step.rescue = None
        if self.watch is not None:
            self.watch.abandon()

    def planned_backward(self, step: Step, index: int) -> Sequence[Any]:
        """One stretch of the schedule, on what the stretch before it left in the step."""
        if step.graphed and self.graphs is not None:
            gradients = self.graphs.backward(step, index)
            if gradients is not None:
                return self._with_idle(gradients, index)
        stretch = self.lowered.stretches[index]
        args: list[Any]
        if index == 0:
            self.begin_moving(step)
            args = self.take_saved(step, self.lowered.written)
            args += [step.tangents[slot] for slot in self.tangent_slots]
            step.tangents = []
        else:
            if step.env is None:
                raise _second_backward()
            args, step.env = step.env, None
        residents = step.residents
        args += [residents[p] for p in self.stretch_positions[index]]
        args += step.sizes
        if step.moving is not None:
            args.insert(0, step.moving)
        with inside(step.arena), self.kernels():
            made: list[Any] = stretch.run(args)
        num = len(stretch.gradients)
        step.env = made[num:]
        del made[num:]
        if index == len(self.leaves) - 1:
            step.moving = None  # of a graph that is kept: this backward's own
        return self._with_idle(made, index)

    def _with_idle(self, made: list[Any], index: int) -> list[Any]:
        if index == len(self.leaves) - 1:
            made += [None] * len(self.joint.idle)
        return made

    def begin_moving(self, step: Step) -> None:
        """A backward begins: what it moves is its own where the graph is kept."""
        step.moving = step.moves
        if step.moves is not None and backward_keeps_graph():
            step.moving = step.moves.fork()

    def take_saved(self, step: Step, written: Sequence[int]) -> list[Any]:
        """What the forward left, to be used up; a copy of it where the graph is kept."""
        saved = step.saved
        if saved is None:
            raise _second_backward()
        if not backward_keeps_graph():
            step.saved = None
            return saved
        kept = list(saved)
        for p in written:  # a second backward must find it as it was
            if p < len(kept):
                kept[p] = kept[p].clone()
        return kept

    def choose_backward(self, step: Step, grads: Sequence[Any]) -> None:
        """Looks at which gradients arrived, in which layout, and inside which autocast, and at
        what was written to since the forward, before anything runs."""
        if step.saved is None:
            raise _second_backward()
        if step.holds is not None:
            step.holds()
        retained = self.changes.retained(step, grads)
        if self.watch is not None:
            self.watch.reached(step, 1)
        step.tangents = list(grads)
        if self.joint.kernels != "eager":
            self._lay_out_for_kernels(step, grads, retained)
            return
        layouts = tuple([None if g is None else layout(g.shape, g.stride()) for g in grads])
        expected = self.expected_layouts(step)
        key = (layouts, autocast_state(), retained)
        if key == (expected, self.joint.autocast, self.joint.retained):
            step.other = None
            changed = self.changes.found(step, self.joint)
            if changed is not None:
                step.other = self._without(changed, key, self.joint)
                self._take_another_way(step)
            elif step.rescue is not None:
                step.rescue.keep_tangents(grads)
            return
        self._take_another_way(step)
        other = self._other_for(step, grads, key, retained)
        self.wanted = other
        changed = self.changes.found(step, other.joint)
        if changed is not None:
            step.other = self._without(changed, key, other.joint)
        elif other.stretch is None and other.twin is None:  # the planned backward, on copies
            step.other = None
            step.tangents = [
                g if g is None else laid_out(g, wanted)
                for g, wanted in zip(step.tangents, expected, strict=True)
            ]
        else:
            step.other = other

    def _lay_out_for_kernels(
        self, step: Step, grads: Sequence[Any], retained: Sequence[int]
    ) -> None:
        """The gradients as the compiled backward reads them: a missing one is zero, as
        torch.compile has it. The backward for other outputs would need another forward."""
        arrived = [k for k, g in enumerate(grads) if g is not None]
        unplanned = [self.internal[k] for k in arrived if self.layouts[k] is None]
        if unplanned or retained:
            planned = [t.output for t in self.joint.tangents]
            what = (
                f"gradients arrived for outputs {unplanned}"
                if unplanned
                else f"outputs {list(retained)} retain their gradients"
            )
            raise RuntimeError(
                f"{what} of a managed module whose compiled kernels were planned for gradients of "
                f'outputs {planned}; pass loss_fn=, or use kernels="eager"'
            )
        changed = self.changes.found(step, self.joint)
        if changed is not None:
            step.other = self._without(changed, (self.layouts,), self.joint)
            self._take_another_way(step)
        step.tangents = [
            g if wanted is None else self._laid_out_tangent(g, k)
            for k, (g, wanted) in enumerate(zip(grads, self.layouts, strict=True))
        ]
        if step.rescue is not None:
            step.rescue.keep_tangents(step.tangents)

    def _laid_out_tangent(self, grad: torch.Tensor | None, slot: int) -> torch.Tensor:
        output = self.internal[slot]
        like = facts(self.joint.outputs[output]).value
        if grad is None:
            stride = next(t.stride for t in self.joint.tangents if t.output == output)
            zero = torch.empty_strided(like.shape, stride, dtype=like.dtype, device=self.device)
            return zero.zero_()
        made = laid_out(grad, self.layouts[slot])
        return made.clone() if made.data_ptr() % ALIGNMENT else made

    def _without(self, changed: Changed, key: tuple[Any, ...], joint: JointGraph) -> OtherBackward:
        """The backward of a step that has lost something since its forward."""
        full = (*key, changed)
        if full not in self.others:
            with outside_modes():
                self.others[full] = OtherBackward(self, joint, changed)
        return self.others[full]

    def _other_for(
        self,
        step: Step,
        grads: Sequence[Any],
        key: tuple[Any, ...],
        retained: tuple[int, ...],
    ) -> OtherBackward:
        """The backward for gradients like these; where sizes change, one for all of them."""
        changing = self.joint.changing
        if changing is None:
            if key not in self.others:
                self.others[key] = self._other_backward(grads, retained)
            return self.others[key]
        likes = [facts(self.joint.outputs[i]).value for i in self.internal]
        key = (strides_key(likes, grads), *key[1:])
        if key not in self.others:
            self.others[key] = self._other_backward(grads, retained)
            if not changing.conditions().hold(step.sizes):
                raise PlanMismatch(
                    "gradients arrived for other outputs than planned, and the backward for them "
                    "does not cover the sizes of this call; run this step again"
                )
        other, at = self.others[key], changing.at(step.sizes)
        slot = {i: k for k, i in enumerate(self.internal)}
        for tangent in other.joint.tangents:
            k = slot[tangent.output]
            wanted = layout(grads[k].shape, at.numbers(tangent.stride))
            step.tangents[k] = laid_out(grads[k], wanted)
        return other

    def _other_backward(self, grads: Sequence[Any], retained: tuple[int, ...]) -> OtherBackward:
        outputs = self.joint.outputs
        tangents = tuple(
            Tangent(self.internal[k], stride_like(facts(outputs[self.internal[k]]).value, g))
            for k, g in enumerate(grads)
            if g is not None
        )
        joint = self.record_backward(self.joint, tangents, autocast_state(), retained)
        with outside_modes():  # lowering tries calls, which are no part of the step
            return OtherBackward(self, joint)


def _second_backward() -> RuntimeError:
    return RuntimeError(
        "Trying to backward through the graph a second time (or directly access saved tensors "
        "after they have already been freed). Specify retain_graph=True if you need to backward "
        "through the graph a second time."
    )


class _Stretch(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, step: Step, index: int, link: torch.Tensor, *_leaves: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = (step, index)
        return link.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_grads: Any) -> Any:
        step, index = ctx.call
        _refuse_double_backward()
        return (None, None, None, *step.runner.backward(step, index))


class _Outputs(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, step: Step, made: list[Any], _link: torch.Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.step = step
        runner = step.runner
        # The tensors given out get a grad_fn that leads here: the step must not hold those.
        outs = tuple(runner.changes.share_counters(made))
        step.given = [weakref.ref(out) for out in outs]
        ctx.mark_non_differentiable(*[outs[k] for k in runner.non_differentiable])
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_double_backward()
        step: Step = ctx.step
        step.runner.choose_backward(step, grads)
        return None, None, None


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a managed module does not support double backward (create_graph=True): its backward "
            "is a fixed schedule without a graph of its own; call the original model for that"
        )
