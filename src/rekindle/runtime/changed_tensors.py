"""Writes between a forward and its backward: which of them eager's autograd refuses, which it
allows, and what a plan can do about those.

Eager refuses a write to what it keeps for the backward, and what it keeps the recording tells: what
the autograd nodes of the fake forward have saved. A plan may keep other tensors, or recompute
from tensors that eager has done with. Where such a one was written to, the backward makes what it
lacks from the rest (`other_gradients`); where that cannot be done it is refused. It is never wrong.

An output is watched through an empty tensor that shares its counter of versions: watching must not
keep alive what the plan says is gone.
"""

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rekindle.capture import JointGraph
from rekindle.capture.node_facts import NO_STORAGE, Source, facts, source_of
from rekindle.capture.op_effects import statistics_of
from rekindle.errors import ChangedInPlace, PlanMismatch
from rekindle.lower.step_emitter import Saved
from rekindle.torch_compat import differentiated_now, kept_tensors, outputs_below

if TYPE_CHECKING:
    from rekindle.runtime.runner import Runner, Step


@dataclass(frozen=True, slots=True)
class Changed:
    """What was written to since the forward, and matters to a backward."""

    outputs: tuple[int, ...]  # slots, as `Changes.leaders` has them
    residents: tuple[int, ...]  # positions among the placeholders
    saved: frozenset[int]  # positions in the saved list


def kept_by_eager(joint: JointGraph) -> frozenset[int]:
    """The storages, of the graph as it was recorded, that eager keeps for this backward: what its
    autograd nodes have saved, be it for a shape alone, and what the backward reads."""
    session = joint.recorded.session
    roots = [session.outputs[t.output] for t in joint.tangents]
    saved = {session.recorder.storage_of(tensor) for tensor in kept_tensors(roots)}
    return frozenset(saved - {NO_STORAGE}).union(
        facts(argument).storage
        for node in joint.recorded.nodes
        if node.op != "placeholder" and facts(node).phase == "backward"
        for argument in node.all_input_nodes
        if facts(argument).phase != "backward" and facts(argument).storage != NO_STORAGE
    )


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor was written in place."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # tensors of inference mode have none; eager never keeps those
        return [0 if t.is_inference() else t._version for t in tensors]


class Changes:
    """What one runner watches."""

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        joint, program = runner.joint, runner.program
        storages = [facts(joint.outputs[i]).storage for i in runner.internal]
        # Outputs over one storage share a counter of versions, as in eager: the first one's.
        self.leader = [storages.index(s) for s in storages]
        self.leaders = sorted(set(self.leader))
        differentiable = [joint.differentiable[i] for i in runner.internal]
        self.entangled = {
            leader
            for leader in self.leaders
            if sum(d for k, d in zip(self.leader, differentiable, strict=True) if k == leader) > 1
        }
        slot_of_storage = dict(zip(storages, self.leader, strict=True))
        self._slot_of_state = {
            (program.values[v].storage, program.values[v].state): slot_of_storage[storage]
            for v in program.given
            if (storage := program.values[v].storage) in slot_of_storage
        }
        self.carried = [self._slots(stretch.carried) for stretch in runner.lowered.stretches]
        self.read = {p for positions in runner.stretch_positions for p in positions}
        self.written = _written(runner)
        self._kept: dict[int, tuple[set[int], set[int]]] = {}
        below = joint.inner_outputs
        # Slots of the outputs that other outputs are computed from.
        self.inner = [slot for slot, i in enumerate(runner.internal) if i in below]

    def _slots(self, carried: Sequence[Saved]) -> list[int]:
        """Per entry of a carried list: the output that it is, or -1."""
        return [self._slot_of_state.get((facts(e.node).storage, e.state), -1) for e in carried]

    # ---- in the forward

    def count_writes(self, residents: Sequence[torch.Tensor]) -> None:
        """What eager's kernels do not count, called below autograd: the forward's own writes."""
        if self.written:
            torch.autograd.graph.increment_version(
                [residents[p] for p in self.written if not residents[p].is_inference()]
            )

    def begin(self, step: "Step", made: Sequence[torch.Tensor], empty: torch.Tensor) -> None:
        """Notes the versions of everything; called when the forward has run."""
        step.versions = versions(step.residents)
        step.watches = []
        for slot in self.leaders:
            watch = made[slot].detach()
            watch.data = empty
            step.watches.append((watch, watch._version))

    def share_counters(self, made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors to hand out: of those over one storage, all count versions together."""
        if len(self.leaders) == len(self.leader):
            return [out.detach() for out in made]
        outs = []
        for slot, leader in enumerate(self.leader):
            out = made[leader].detach()
            if leader != slot:
                out.data = made[slot]
            outs.append(out)
        return outs

    # ---- in the backward

    def found(self, step: "Step", joint: JointGraph) -> Changed | None:
        """What this backward must do without; None for nothing. Raises where eager would."""
        pairs = zip(self.leaders, step.watches, strict=True)
        slots = [slot for slot, (watch, before) in pairs if watch._version != before]
        now = versions(step.residents)
        if not slots and now == step.versions:
            return None
        residents = [p for p, v in enumerate(step.versions) if v != now[p]]
        kept_slots, kept_residents = self._kept_by_eager(joint)
        for p in residents:
            if p in kept_residents:
                raise self._as_eager(step, p)
        for slot in slots:
            if slot in kept_slots:
                raise RuntimeError(f"{_MODIFIED} {self._output(slot)} has been written to.")
            if slot in self.entangled:
                raise ChangedInPlace(
                    f"{self._output(slot)} was changed in place before the backward, and another "
                    "output shares its memory; autograd's record of such a write cannot be "
                    "followed: change a clone of it (out.clone())"
                )
        saved = frozenset() if step.graphed else self._spoiled(slots)
        if not saved and not self.read.intersection(residents) and joint is self.runner.joint:
            return None
        if not saved and not residents:
            return None
        return Changed(tuple(slots), tuple(residents), saved)

    def _spoiled(self, slots: Sequence[int]) -> frozenset[int]:
        first = self.carried[0]
        return frozenset(position for position, slot in enumerate(first) if slot in slots)

    def check_later(self, step: "Step", index: int) -> None:
        """Before a stretch that is not the first: what hooks may have written to meanwhile."""
        positions = self.runner.stretch_positions[index]
        for p, now in zip(positions, versions([step.residents[p] for p in positions]), strict=True):
            if now != step.versions[p]:
                raise self._as_eager(step, p)
        for slot in self.carried[index]:
            if slot >= 0:
                watch, before = step.watches[self.leaders.index(slot)]
                if watch._version != before:
                    raise RuntimeError(f"{_MODIFIED} {self._output(slot)} has been written to.")

    def retained(self, step: "Step", grads: Sequence[torch.Tensor | None]) -> tuple[int, ...]:
        """The outputs that retain their gradient and that the model went on computing from: the
        plan hands out that gradient, since autograd sees only what comes from outside of it. For
        hooks on such outputs, or where a caller asks for their gradient, it would be too late."""
        if not self.inner:
            return ()
        asked = {id(t) for t in differentiated_now()}
        given = {slot: out for slot in self.inner if (out := step.given[slot]()) is not None}
        refused = [k for k, out in given.items() if _has_hooks(out) or id(out) in asked]
        retained = [k for k, out in given.items() if out.retains_grad]
        if not refused and not retained:
            return ()
        internal, outputs = self.runner.internal, self.runner.joint.recorded.session.outputs
        arrived = [outputs[i] for i, g in zip(internal, grads, strict=True) if g is not None]
        inside = outputs_below(arrived, outputs)
        for slot in refused:
            if internal[slot] in inside:
                raise self._looks_inside(slot)
        return tuple([internal[slot] for slot in retained if internal[slot] in inside])

    def watch_inner(self, outs: Sequence[torch.Tensor]) -> None:
        """Refuses to give a part of the gradient of an output for the whole: where that alone is
        asked for, this is the last code to see it."""
        for slot in self.inner:
            out = outs[slot]
            if out.requires_grad:
                out.register_hook(_Alone(self, slot, weakref.ref(out)))

    def _looks_inside(self, slot: int) -> PlanMismatch:
        return PlanMismatch(
            f"a hook was set on {self._output(slot)}, or its gradient was asked for, and other "
            "outputs are computed from it: autograd sees only a part of that gradient. Use "
            "retain_grad(), or call the original model where you need it"
        )

    def _kept_by_eager(self, joint: JointGraph) -> tuple[set[int], set[int]]:
        """Slots and positions of what eager keeps for this backward."""
        found = self._kept.get(id(joint))
        if found is None:
            storages, recorded = kept_by_eager(joint), joint.recorded
            sources = {
                source_of(node)
                for node in recorded.nodes
                if node.op == "placeholder" and facts(node).storage in storages
            }
            found = self._kept[id(joint)] = (
                {
                    leader
                    for leader, i in zip(self.leader, self.runner.internal, strict=True)
                    if facts(recorded.outputs[i]).storage in storages
                },
                {p for p, n in enumerate(self.runner.placeholders) if source_of(n) in sources},
            )
        return found

    # ---- sentences

    def refusal(self, changed: Changed) -> ChangedInPlace:
        """Of what eager allows and this plan cannot do."""
        spoiled = {self.carried[0][p] for p in changed.saved}
        names = [self._output(slot) for slot in sorted(spoiled)]
        names += [self._resident(p) for p in changed.residents if p in self.read]
        return ChangedInPlace(
            f"{' and '.join(names)} changed in place between the forward and the backward. Eager "
            "PyTorch allows it, since it does not keep that tensor for the backward; this plan "
            "computes parts of the forward again from it, and the rest is not enough. Change a "
            "clone of it, change it after the backward, or use a larger budget"
        )

    def _as_eager(self, step: "Step", p: int) -> RuntimeError:
        tensor = step.residents[p]
        return RuntimeError(
            f"{_MODIFIED} {self._resident(p)} of shape {list(tensor.shape)} is at version "
            f"{tensor._version}; expected version {step.versions[p]} instead."
        )

    def _resident(self, p: int) -> str:
        node = self.runner.placeholders[p]
        source: Source = source_of(node)
        readers = [facts(user).where for user in node.users if facts(user).where]
        return f"{source.kind} {source.name}" + (f" (read at {readers[0]})" if readers else "")

    def _output(self, slot: int) -> str:
        i = self.runner.internal[slot]
        known = facts(self.runner.joint.outputs[i])
        made = f", made at {known.where}" if known.where else ""
        return f"output tensor {i} of the model (shape {list(known.value.shape)}{made})"


class _Alone:
    """A hook on an output: raises where its gradient is asked for, and would be a part of it."""

    __torch_unserialize__ = True  # a tensor that is saved does without it

    def __init__(self, changes: Changes, slot: int, out: "weakref.ref[torch.Tensor]") -> None:
        self.changes, self.slot, self.out = changes, slot, out

    def __call__(self, _gradient: torch.Tensor) -> None:
        out = self.out()
        if out is not None and any(t is out for t in differentiated_now()):
            raise self.changes._looks_inside(self.slot)


_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation:"
)


def _has_hooks(out: torch.Tensor) -> bool:
    """Hooks that may look at the gradient. Those of torch.distributed mark a time only: sharded
    modules set one on every output."""
    hooks = [
        hook.func if isinstance(hook, functools.partial) else hook
        for hook in (out._backward_hooks or {}).values()
    ]
    names = [getattr(h, "__module__", None) or "" for h in hooks if not isinstance(h, _Alone)]
    return not all(name.startswith("torch.distributed") for name in names)


def _written(runner: "Runner") -> list[int]:
    """Positions of the placeholders that the forward writes to in place, as eager counts it."""
    joint = runner.joint
    storages = {
        facts(written).storage
        for node in joint.recorded.nodes
        if node.op != "placeholder" and facts(node).phase == "forward"
        for written in facts(node).writes
        # Norms that move their statistics do not count it in eager either.
        if written not in statistics_of(node)
    }
    position = {source_of(n): p for p, n in enumerate(runner.placeholders)}
    return [
        position[source_of(n)]
        for n in joint.recorded.nodes
        if n.op == "placeholder" and facts(n).storage in storages and source_of(n) in position
    ]
