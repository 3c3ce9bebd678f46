"""One real training step as it is seen from outside the regions: what runs between them, which
storages cross, and when each is gone.

A dispatch mode sees the ops that run eagerly in the forward. In the backward, hooks on the nodes of
the autograd graph put the mode on for one node each: the engine restores its thread's state behind
every node, so nothing stays on. While a region runs the mode is paused, for its own problem has its
ops; what it gives out, and what gradients it gets and makes, is noted at its borders. Nothing here
changes what is computed, and no tensor is kept: storages are watched through weak references.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rekindle.capture.node_facts import facts, source_of
from rekindle.profile import blocks_of
from rekindle.runtime.regions.kinds import RegionKind
from rekindle.runtime.runner import Runner
from rekindle.solve.regions import Key, RegionCall, Step, StepEvent, Storage
from rekindle.torch_compat import FakeTensor, TorchDispatchMode, push_mode, pytree, storage_key

_RESIDENT = -1


@dataclass
class RecordedCall:
    """One call of a region, and what was seen at its borders."""

    kind: RegionKind
    path: str
    number: int  # of the calls of this module in the step
    given: dict[int, int] = field(default_factory=dict)  # value -> storage
    tangents: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)
    final: set[int] = field(default_factory=set)
    has_backward: bool = False

    @property
    def key(self) -> Key:
        return self.path, self.number, self.kind.hash


@dataclass
class _Seen:
    size: int
    born: int
    died: int | None = None


class Recording:
    """Events and storages of one step."""

    def __init__(self, residents: Iterable[torch.Tensor], device: torch.device) -> None:
        self.device = device
        self.events: list[StepEvent] = []
        self.storages: list[_Seen] = []
        self.calls: list[RecordedCall] = []
        self.held: list[int] = []
        self.loss_event: int | None = None
        self.mode = _Mode(self)
        self._blocks = blocks_of(device.type)
        self._known: dict[int, int] = {}
        self._paused = 0
        self._stopped = False
        self._handles: list[Any] = []
        self._graph: weakref.ref[Any] | None = None  # something that lives as long as the graph
        self._steps: dict[int, weakref.ref[Any]] = {}  # of calls
        self._expected: set[int] = set()  # calls that a backward from the model's outputs reaches
        for tensor in residents:
            self._enter(tensor, _RESIDENT)

    # ---- storages

    def _enter(self, tensor: torch.Tensor, index: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._known[key] = index
        weakref.finalize(storage, self._gone, key, index).atexit = False

    def _gone(self, key: int, index: int) -> None:
        self._known.pop(key, None)
        if index != _RESIDENT:
            self.storages[index].died = max(0, len(self.events) - 1)

    def note(self, tensor: Any, born: int | None = None) -> int:
        """The index of a tensor's storage; it was born with the event that runs now unless it is
        known, or was said to be there since another."""
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            return _RESIDENT
        try:
            key = storage_key(tensor)
        except (RuntimeError, NotImplementedError):  # sparse, or a subclass without a storage
            return _RESIDENT
        if key in self._known:
            return self._known[key]
        if tensor.device.type != self.device.type:
            return _RESIDENT
        size = self._blocks.block_bytes(tensor.untyped_storage().nbytes())
        now = max(0, len(self.events) - 1) if born is None else born
        self.storages.append(_Seen(size, now))
        self._enter(tensor, len(self.storages) - 1)
        return len(self.storages) - 1

    # ---- events

    def event(self, event: StepEvent) -> int:
        self.events.append(event)
        return len(self.events) - 1

    def op(self, name: str, out: Any, cost_ns: int) -> None:
        """An op that ran eagerly."""
        if self._paused:
            return
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        fresh = [t for t in tensors if self._is_new(t)]
        if fresh or not self.events or self.events[-1].kind != "op":
            self.event(StepEvent("op", name, cost=cost_ns))
            for tensor in fresh:
                self.note(tensor)
        else:  # a view: its time counts, and its memory is known
            last = self.events[-1]
            self.events[-1] = StepEvent("op", last.name, cost=last.cost + cost_ns)

    def _is_new(self, tensor: torch.Tensor) -> bool:
        try:
            return storage_key(tensor) not in self._known
        except (RuntimeError, NotImplementedError):
            return False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in here is no opaque code."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    # ---- regions

    def forward(self, call: RecordedCall, runner: Runner, outs: Sequence[Any]) -> None:
        """A region has run its forward and gives these tensors out."""
        k = len(self.calls)
        self.calls.append(call)
        self.event(StepEvent("forward", call.path, call=k))
        by_storage = {runner.program.values[v].storage: v for v in runner.program.given}
        for slot, out in enumerate(outs):
            is_new = self._is_new(out)
            index = self.note(out)
            value = by_storage.get(facts(runner.joint.outputs[runner.internal[slot]]).storage)
            if is_new and index != _RESIDENT and value is not None:
                call.given[value] = index
        made = next((out.grad_fn for out in outs if out.grad_fn is not None), None)
        if made is not None:
            stretch = made.next_functions[0][0]
            self._steps[k] = weakref.ref(stretch.call[0])
            self._hook(made, before=_weakly(self._arrived, call, runner))
            self._hook(
                stretch,
                before=_weakly(self._begin, k),
                after=_weakly(self._handed, call, runner),
            )

    def _arrived(self, call: RecordedCall, runner: Runner, grads: Sequence[Any]) -> None:
        # A graph that is kept may run backward again: one step is what is planned.
        self._stopped |= call.has_backward
        if self._stopped:
            return
        made_by_loss = {v for op in runner.program.ops if not op.nodes for v in op.outputs}
        value_of = {runner.program.values[v].storage: v for v in made_by_loss}
        for node in runner.joint.nodes:
            if node.op == "placeholder" and source_of(node).kind == "tangent":
                tangent = runner.joint.tangents[source_of(node).index]
                slot = runner.internal.index(tangent.output)
                grad = grads[slot] if slot < len(grads) else None
                value = value_of.get(facts(node).storage)
                if grad is not None and value is not None:
                    index = self.note(grad, born=self.loss_event)
                    if index != _RESIDENT:
                        call.tangents[value] = index

    def _begin(self, k: int, _grads: Any) -> None:
        if self._stopped:
            return
        self.calls[k].has_backward = True
        self.event(StepEvent("backward", self.calls[k].path, call=k))

    def _handed(self, call: RecordedCall, runner: Runner, made: Any, _grads: Any) -> None:
        if self._stopped:
            return
        leaves = [leaf for leaf in runner.leaves[0] if leaf not in runner.slot_of_output]
        gradient_of = dict(runner.joint.gradients)
        outputs = {runner.program.values[v].storage: v for v in runner.program.outputs}
        for leaf, grad in zip(leaves, made[-len(leaves) :] if leaves else (), strict=True):
            if grad is None or leaf not in gradient_of:
                continue
            value = outputs.get(facts(gradient_of[leaf]).storage)
            if value is None:
                continue
            if self._is_new(grad):
                call.gradients[value] = self.note(grad)
            if source_of(leaf).kind == "parameter":
                call.final.add(value)
        push_mode(self.mode)  # for the sums that the engine makes of what was handed out

    # ---- the whole step

    def returned(self, tensors: Iterable[torch.Tensor]) -> None:
        """The model's forward is over."""
        given = list(tensors)
        self.loss_event = self.event(StepEvent("loss", "loss"))
        self.held = [i for i in (self.note(t) for t in given) if i != _RESIDENT]
        alive = _Alive()
        self._graph = weakref.ref(alive)
        seen: set[Any] = set()
        stack = [t.grad_fn for t in given if t.grad_fn is not None]
        first = list(stack)
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            name = type(node).__name__
            if name == "_StretchBackward":
                own = node.call[0]
                self._expected.update(k for k, step in self._steps.items() if step() is own)
            if name not in ("_StretchBackward", "_OutputsBackward"):
                self._hook(node, before=_weakly(self._opaque, alive if node in first else None))
            elif node in first:
                self._hook(node, before=_weakly(_nothing, alive))
            stack += [below for below, _ in node.next_functions]

    def _opaque(self, _alive: Any, grads: Any) -> None:
        if self._stopped:
            return
        for grad in grads:
            self.note(grad, born=self.loss_event)
        push_mode(self.mode)

    def _hook(self, node: Any, before: Any = None, after: Any = None) -> None:
        if before is not None:
            self._handles.append(node.register_prehook(before))
        if after is not None:
            self._handles.append(node.register_hook(after))

    @property
    def is_complete(self) -> bool:
        """Whether the backward has been through all regions that it reaches."""
        calls = [self.calls[k] for k in self._expected]
        return bool(calls) and all(call.has_backward for call in calls)

    @property
    def is_pending(self) -> bool:
        """Whether its backward may still come, or go on."""
        alive = self._graph is not None and self._graph() is not None
        return alive and not self.is_complete

    def close(self) -> None:
        """Takes the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step(self, hold_outputs: bool) -> Step:
        """What was seen, as data."""
        calls = tuple(
            RegionCall(
                *(c.kind.problem, c.key, dict(c.given), dict(c.tangents), dict(c.gradients)),
                frozenset(c.final),
            )
            for c in self.calls
        )
        # Regions whose backward did not run keep what they keep: to the end.
        late = [k for k, c in reversed(list(enumerate(self.calls))) if not c.has_backward]
        return Step(
            (*self.events, *(StepEvent("backward", calls[k].path, call=k) for k in late)),
            tuple(Storage(s.size, s.born, s.died) for s in self.storages),
            calls,
            tuple(self.held) if hold_outputs else (),
        )


class _Alive:
    """Held by the graph's first nodes alone."""

    __slots__ = ("__weakref__",)


def _nothing(*_: Any) -> None: ...


def _weakly(method: Callable[..., Any], *given: Any) -> Callable[..., None]:
    """A hook that gives autograd nothing back."""

    def hook(*grads: Any) -> None:
        with torch.no_grad():
            method(*given, *grads)

    return hook


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begun = time.perf_counter_ns()
        out = func(*args, **(kwargs or {}))
        self.recording.op(str(func), out, time.perf_counter_ns() - begun)
        return out
