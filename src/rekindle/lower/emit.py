"""Program + Schedule -> fx graphs: one for the forward, several for the backward.

Nodes are copied in schedule order, repeats included. Each copy of a value is the result of the
step that made it; fx's Python code drops a name after its last use, so a copy dies exactly where
the simulation says. Views are re-made from the copy they look at and kept as long as they are
used. What a later graph reads of an earlier one is carried in a list.

- A step whose op writes in place runs as recorded where the old state dies there, and on a copy of
  the storage elsewhere.
- A random op that runs again keeps the generator's state of its first run and replays it.
- Batch norm that runs again leaves its running statistics alone.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rekindle.capture import effects
from rekindle.capture.program import Program, ProgramOp
from rekindle.core import Schedule
from rekindle.lower import bind
from rekindle.lower.calls import clone_storage, replay, rng_state
from rekindle.lower.code import compile_boxed

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Saved:
    """One entry of the list that the forward leaves: a tensor, or the state of the random stream
    before `node` ran."""

    node: fx.Node  # the root whose tensor it is, or the random op
    state: int  # of the storage; -1 for a random state


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the backward: what it reads besides the carried list, and what leaves it."""

    run: Callable[[list[Any]], Any]  # (carried + residents) -> (gradients..., carried...)
    residents: tuple[fx.Node, ...]
    gradients: tuple[fx.Node, ...]  # placeholders whose gradients leave
    source: str


@dataclass(frozen=True, slots=True)
class Lowered:
    forward: Callable[[list[Any]], Any]  # (residents) -> (outputs..., carried...)
    forward_residents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]  # per output of the graph; None: not from this graph
    tangents: tuple[int, ...]  # which tangents the backward reads, appended to the carried list
    stretches: tuple[Stretch, ...]
    saved: tuple[Saved, ...]
    written: tuple[int, ...]  # positions of the saved list that the backward writes over
    forward_source: str


@dataclass(slots=True)
class _Buffer:
    """The tensors of one copy inside the graph being written."""

    roots: dict[fx.Node, fx.Node] = field(default_factory=dict)
    views: dict[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Copy:
    value: int
    made: int  # step
    last: int  # step of its last read; the end where it lives on


def emit(program: Program, schedule: Schedule, max_stretches: int = 12) -> Lowered:
    return _Emitter(program, schedule.ops, max_stretches).lowered()


def emit_resumed(
    program: Program, saved: Sequence[Saved]
) -> tuple[Stretch, tuple[int, ...]] | None:
    """The whole backward of a program, from what the forward of another plan has saved, and which
    of that it writes over; None where it does not suffice. (The other plan has the same forward
    and other gradients arrive.)"""
    value_of = {(v.storage, v.state): i for i, v in enumerate(program.values) if not v.resident}
    start: list[tuple[int, fx.Node] | None] = []
    states = set()
    for entry in saved:
        if entry.state < 0:
            states.add(entry.node)
            start.append(None)
        else:
            value = value_of.get((entry.node.meta["storage"], entry.state))
            start.append(None if value is None else (value, entry.node))
    there = {item[0] for item in start if item is not None}
    steps = _resumed_steps(program, there, states)
    if steps is None:
        return None
    emitter = _Emitter(program, steps, 1, start, saved)
    return emitter.resumed()


def _resumed_steps(
    program: Program, there: set[int], states: set[fx.Node]
) -> tuple[int, ...] | None:
    """The loss and the backward in the listed order, each op preceded by what it lacks."""
    producer = {v: i for i, op in enumerate(program.ops) for v in op.outputs}
    loss = next(i for i, op in enumerate(program.ops) if op.phase == "loss")
    there = there | {v for v, value in enumerate(program.values) if value.storage is None}
    there |= {v for v, value in enumerate(program.values) if value.resident}
    there |= set(program.ops[loss].outputs)
    steps = [loss]
    for i, op in enumerate(program.ops):
        stack = [i] if op.phase == "backward" else []
        while stack:
            top = program.ops[stack[-1]]
            missing = [v for v in top.inputs if v not in there]
            if missing:
                stack += [producer[v] for v in missing]
                if len(stack) > len(program.ops) * 4:
                    return None
                continue
            now = stack.pop()
            if now != i and all(v in there for v in top.outputs):
                continue
            random = [n for n in top.nodes if effects.is_random(n.target)]
            if top.phase == "forward" and (
                not top.recomputable or any(n not in states for n in random)
            ):
                return None
            steps.append(now)
            there |= set(top.outputs)
    return tuple(steps)


class _Emitter:
    def __init__(
        self,
        program: Program,
        steps: Sequence[int],
        max_stretches: int,
        start: Sequence[tuple[int, fx.Node] | None] = (),
        saved: Sequence[Saved] | None = None,
    ) -> None:
        self.program = program
        self.steps = steps
        self.start = start
        self.resuming = saved  # the list of another plan, which may be empty; None: there is none
        self.max_stretches = max_stretches
        self.joint = program.joint
        self.values = program.values
        self.tangent_nodes = {
            n.meta["source"].index: n
            for n in self.joint.nodes
            if n.op == "placeholder" and n.meta["source"].kind == "tangent"
        }
        self.saved_at: dict[int, list[int]] = {}  # copy -> positions in the saved list
        self.written: set[int] = set()
        self._read_schedule()

    # ---- lifetimes, by the simulator's rule

    def _read_schedule(self) -> None:
        ops, end = self.program.ops, len(self.steps)
        current: dict[int, int] = {}
        made: list[tuple[int, int]] = []  # per copy: value, step
        last: list[int] = []
        self.reads: list[dict[int, int]] = []  # per step: value -> copy
        self.makes: list[dict[int, int]] = []
        self.given: dict[int, int] = {}  # value -> copy that the caller gets
        self.loss_step = end
        runs: dict[int, int] = {}
        resumes = self.resuming is not None
        for item in self.start:
            if item is not None and item[0] not in current:
                current[item[0]] = len(made)
                made.append((item[0], -1))
                last.append(-1)
        self.started = dict(current)
        for t, i in enumerate(self.steps):
            op = ops[i]
            runs[i] = runs.get(i, 0) + 1
            reads = {
                v: current[v]
                for v in op.inputs
                if not self.values[v].resident
                and not (resumes and (op.phase == "loss" or self.values[v].storage is None))
            }
            for copy in reads.values():
                last[copy] = t
            self.reads.append(reads)
            if op.phase == "loss":
                self.loss_step = t
                self.given = {v: current[v] for v in self.program.given if v in current}
            makes = {}
            for v in op.outputs:
                makes[v] = current[v] = len(made)
                made.append((v, t))
                last.append(t)
            self.makes.append(makes)
        self.internal_last = list(last)
        for v in self.program.held:
            if v in self.given:
                last[self.given[v]] = end
        for v in self.program.outputs:
            last[current[v]] = end
        self.final = current
        self.final_copy = {self.values[v].storage: current[v] for v in self.program.outputs}
        self.copies = [_Copy(v, t, e) for (v, t), e in zip(made, last, strict=True)]
        self.runs = runs

    def dies(self, copy: int, step: int) -> bool:
        return self.copies[copy].last == step

    # ---- where the backward is cut

    def _cuts(self) -> list[int]:
        """Steps at which a new stretch begins: gradients are handed out in about `max_stretches`
        equal shares of their bytes, none below a share that is worth the call."""
        leave = sorted(self.leaves.values())
        begin = self.loss_step + 1
        if not leave:
            return [begin]
        sizes: dict[int, int] = {}
        for leaf, step in self.leaves.items():
            sizes[step] = sizes.get(step, 0) + leaf.meta["storage_bytes"]
        share = max(*sizes.values(), sum(sizes.values()) // self.max_stretches, _SHARE_BYTES)
        cuts, held = [begin], 0
        for step in sorted(sizes):
            held += sizes[step]
            if held >= share and step < leave[-1]:
                cuts.append(step + 1)
                held = 0
        return cuts

    def _gradient_steps(self) -> dict[fx.Node, int]:
        """Placeholder -> the step after which nothing reads its gradient any more."""
        found = {}
        self.handed_out: dict[int, int] = {}  # copy -> the last such step of its gradients
        for leaf, gradient in self.joint.gradients:
            copy = self.final_copy.get(gradient.meta["storage"])
            step = self.loss_step if copy is None else self.internal_last[copy]
            found[leaf] = max(step, self.loss_step + 1)
            if copy is not None:
                self.handed_out[copy] = max(found[leaf], self.handed_out.get(copy, -1))
        return found

    # ---- graphs

    def lowered(self) -> Lowered:
        self.buffers: dict[int, _Buffer] = {}  # copy -> its tensors
        self.rng: dict[tuple[int, fx.Node], fx.Node] = {}
        self.rng_last = self._last_replays()
        self.seen: set[int] = set()
        self.leaves = self._gradient_steps()
        gradient_of = dict(self.joint.gradients)
        self._begin([])
        for t in range(self.loss_step):
            self._step(t)
        out_items = [self._output(node) for node in self.joint.outputs]
        outs = [n for n in out_items if n is not None]
        carried = self._carried(self.loss_step + 1)
        run, source = self._end(outs, carried)
        forward = (run, tuple(self.residents), source)
        if self.loss_step == len(self.steps):
            return Lowered(forward[0], forward[1], tuple(out_items), (), (), (), (), source)
        saved = tuple(self._saved(item) for item in carried)
        self._note_saved(carried)
        tangents = self._tangents_read()
        carried += [("tangent", i) for i in tangents]
        cuts = [*self._cuts(), len(self.steps)]
        stretches = []
        for begin, stop in itertools.pairwise(cuts):
            self._begin(carried)
            if begin == cuts[0]:
                self._bind_tangents(tangents)
            for t in range(begin, stop):
                self._step(t)
            final = stop == len(self.steps)
            leaving = [
                leaf
                for leaf, t in self.leaves.items()
                if begin <= t < stop or (final and t >= stop)
            ]
            gradients = [self._gradient(gradient_of[leaf]) for leaf in leaving]
            carried = self._carried(stop)
            run, source = self._end(gradients, carried)
            stretches.append(Stretch(run, tuple(self.residents), tuple(leaving), source))
        return Lowered(
            forward[0],
            forward[1],
            tuple(out_items),
            tuple(tangents),
            tuple(stretches),
            saved,
            tuple(sorted(self.written)),
            forward[2],
        )

    def _saved(self, item: Any) -> Saved:
        if item[0] == "rng":
            return Saved(item[1][1], -1)
        copy, root = item
        return Saved(root, self.values[self.copies[copy].value].state)

    def _note_saved(self, carried: Sequence[Any]) -> None:
        """Where each copy stands in the list that the forward leaves."""
        for position, item in enumerate(carried):
            if isinstance(item[0], int):
                self.saved_at.setdefault(item[0], []).append(position)

    def resumed(self) -> tuple[Stretch, tuple[int, ...]]:
        """One stretch that begins with the saved list of another plan and all tangents."""
        self.buffers = {}
        self.rng = {}
        self.rng_last = {
            i: t for t, i in enumerate(self.steps) if self.program.ops[i].phase == "forward"
        }
        self.seen = {i for i, op in enumerate(self.program.ops) if op.phase == "forward"}
        self.leaves = self._gradient_steps()
        op_of = {n: i for i, op in enumerate(self.program.ops) for n in op.nodes}
        carried: list[Any] = []
        assert self.resuming is not None
        for item, entry in zip(self.start, self.resuming, strict=True):
            if item is not None:
                copy = self.started[item[0]]
                self.buffers.setdefault(copy, _Buffer())
                carried.append((copy, item[1]))
            elif entry.state < 0 and entry.node in op_of:
                carried.append(("rng", (op_of[entry.node], entry.node)))
            else:
                carried.append(("unused", None))
        tangents = list(self.tangent_nodes)
        self._note_saved(carried)
        self._begin([*carried, *(("tangent", i) for i in tangents)])
        self._bind_tangents(tangents)
        for t in range(1, len(self.steps)):
            self._step(t)
        gradient_of = dict(self.joint.gradients)
        gradients = [self._gradient(gradient_of[leaf]) for leaf in self.leaves]
        run, source = self._end(gradients, [])
        stretch = Stretch(run, tuple(self.residents), tuple(self.leaves), source)
        return stretch, tuple(sorted(self.written))

    def _begin(self, carried: Sequence[Any]) -> None:
        self.graph = fx.Graph()
        self.first_call: fx.Node | None = None
        self.residents: dict[fx.Node, fx.Node] = {}
        self.resident_views: dict[fx.Node, fx.Node] = {}
        self.incoming_tangents: dict[int, fx.Node] = {}
        again: set[int] = set()  # copies whose tensors of the graph before are forgotten
        for position, item in enumerate(carried):
            like = item[1].meta["val"] if isinstance(item[0], int) else None
            if item[0] == "tangent":
                like = self.tangent_nodes[item[1]].meta["val"]
            node = self._placeholder(f"carried_{position}", like)
            if item[0] == "rng":
                self.rng[item[1]] = node
            elif item[0] == "tangent":
                self.incoming_tangents[item[1]] = node
            elif item[0] != "unused":
                copy, root = item
                buffer = self.buffers[copy]
                if copy not in again:
                    again.add(copy)
                    buffer.roots, buffer.views = {}, {}
                buffer.roots[root] = node

    def _bind_tangents(self, tangents: Sequence[int]) -> None:
        op = self.program.ops[self.steps[self.loss_step]]
        for index in tangents:
            root = self.tangent_nodes[index]
            copy = self.makes[self.loss_step][op.makes[root.meta["storage"]]]
            self.buffers[copy] = _Buffer({root: self.incoming_tangents[index]})

    def _tangents_read(self) -> list[int]:
        op = self.program.ops[self.steps[self.loss_step]]
        found = []
        for index, root in self.tangent_nodes.items():
            copy = self.makes[self.loss_step][op.makes[root.meta["storage"]]]
            gradient = any(
                g.meta["storage"] == root.meta["storage"] for _, g in self.joint.gradients
            )
            if self.internal_last[copy] > self.loss_step or gradient:
                found.append(index)
        return found

    def _end(
        self, results: list[fx.Node], carried: list[Any]
    ) -> tuple[Callable[[list[Any]], Any], str]:
        outs = list(results)
        for item in carried:
            if item[0] == "rng":
                outs.append(self.rng[item[1]])
            else:
                copy, root = item
                outs.append(self.buffers[copy].roots[root])
        self.graph.output(outs)
        return compile_boxed(self.graph)

    def _carried(self, stop: int) -> list[Any]:
        """What later graphs read: copies made before `stop` and used at or after it."""
        items: list[Any] = []
        for copy, buffer in self.buffers.items():
            if self._needed_after(copy, stop):
                items += [(copy, root) for root in buffer.roots]
        items += [("rng", key) for key in self.rng if self.rng_last.get(key[0], -1) >= stop]
        self.buffers = {c: b for c, b in self.buffers.items() if self._needed_after(c, stop)}
        self.rng = {k: n for k, n in self.rng.items() if self.rng_last.get(k[0], -1) >= stop}
        return items

    def _needed_after(self, copy: int, stop: int) -> bool:
        if self.copies[copy].made >= stop:
            return False
        if self.internal_last[copy] >= stop:
            return True
        # A gradient is carried until the stretch that hands it out.
        return self.handed_out.get(copy, -1) >= stop

    # ---- steps

    def _step(self, t: int) -> None:
        op = self.program.ops[self.steps[t]]
        first = self.steps[t] not in self.seen
        self.seen.add(self.steps[t])
        reads, makes = self.reads[t], self.makes[t]
        self._place: dict[int, _Buffer] = {}  # storage -> the tensors this step sees
        for storage, value in op.reads.items():
            self._place[storage] = self.buffers[reads[value]]
        instead = op.instead
        if instead is not None and self.dies(reads[instead.source], t):
            self.written.update(self.saved_at.get(reads[instead.source], ()))
            self._emit_instead(op, t)
        else:
            for storage in op.writes:
                old = reads[op.reads[storage]]
                if not self.dies(old, t):
                    self._place[storage] = self._copied(storage, self.buffers[old])
                else:
                    self.written.update(self.saved_at.get(old, ()))
            for node in op.nodes:
                self._emit_call(node, op, t, first)
        for storage, value in op.makes.items():
            self.buffers[makes[value]] = self._place[storage]
        for copy in reads.values():
            if self.dies(copy, t) or self.copies[copy].last == t:
                self.buffers.pop(copy, None)
        for value in op.makes.values():
            if self.internal_last[makes[value]] == t and self.copies[makes[value]].last == t:
                self.buffers.pop(makes[value], None)

    def _emit_instead(self, op: ProgramOp, t: int) -> None:
        instead = op.instead
        assert instead is not None
        node = op.nodes[0]
        args: tuple[Any, ...] = fx.node.map_arg(instead.args, self._tensor)
        kwargs = {**fx.node.map_arg(node.kwargs, self._tensor)}
        kwargs[instead.out_name] = self._tensor(instead.out)
        out = self._call(instead.call, args, kwargs, node.meta["val"])
        self._place[node.meta["storage"]] = _Buffer({node: out})

    def _emit_call(self, node: fx.Node, op: ProgramOp, t: int, first: bool) -> None:
        given = list(node.args)
        if not first:
            for position in effects.statistics_positions(node):
                given[position] = None
        args: tuple[Any, ...] = fx.node.map_arg(tuple(given), self._tensor)
        kwargs = fx.node.map_arg(node.kwargs, self._tensor)
        target: Any = node.target
        key = (self.steps[t], node)
        if effects.is_random(node.target) and self.rng_last.get(self.steps[t], -1) >= 0:
            device = self._device(node)
            if first:
                self.rng[key] = self._call(rng_state, (device,), {})
            else:
                target, args = replay, (node.target, device, self.rng[key], *args)
        out = self._call(target, args, kwargs, node.meta.get("val"))
        if "storage" in node.meta:
            if node.meta["storage"] in op.makes:
                self._place.setdefault(node.meta["storage"], _Buffer()).roots[node] = out
            return
        for user in node.users:
            if user.target is operator.getitem and user.meta.get("storage") in op.makes:
                if self._is_read(user, op, t):
                    part = self._call(operator.getitem, (out, user.args[1]), {}, user.meta["val"])
                    buffer = self._place.setdefault(user.meta["storage"], _Buffer())
                    buffer.roots[user] = part
                else:
                    self._place.setdefault(user.meta["storage"], _Buffer())

    def _is_read(self, part: fx.Node, op: ProgramOp, t: int) -> bool:
        copy = self.copies[self.makes[t][op.makes[part.meta["storage"]]]]
        return copy.last > t or len(op.nodes) > 1

    def _copied(self, storage: int, buffer: _Buffer) -> _Buffer:
        [(root, tensor)] = buffer.roots.items()
        return _Buffer({root: self._call(clone_storage, (tensor,), {}, root.meta["val"])})

    def _call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Any = None
    ) -> fx.Node:
        """A call whose result looks `like` this tensor without data."""
        node = bind.call(self.graph, target, args, kwargs)
        self.first_call = self.first_call or node
        node.meta["like"] = like if isinstance(like, torch.Tensor) else None
        return node

    def _placeholder(self, name: str, like: Any = None) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["like"] = like
        return node

    def _device(self, node: fx.Node) -> torch.device:
        val = node.meta["val"]
        first = next(
            v for v in (val if isinstance(val, (list, tuple)) else (val,)) if v is not None
        )
        return torch.device(first.device)

    # ---- tensors

    def _tensor(self, node: fx.Node) -> fx.Node:
        """The tensor of a recorded node at this step: its copy, and the view of it."""
        storage = self._storage(node)
        place = self._place.get(storage)
        if place is None:
            return self._resident(node)
        return self._view(node, place.roots, place.views)

    def _storage(self, node: fx.Node) -> int:
        while "storage" not in node.meta:
            node = self.program.base[node]
        return int(node.meta["storage"])

    def _resident(self, node: fx.Node) -> fx.Node:
        base = node
        while base in self.program.base:
            base = self.program.base[base]
        if base not in self.residents:
            assert base.op == "placeholder", f"{base} is read before it is made"
            if self.first_call is None:
                self.residents[base] = self._placeholder(base.name, base.meta["val"])
            else:
                with self.graph.inserting_before(self.first_call):
                    self.residents[base] = self._placeholder(base.name, base.meta["val"])
        return self._view(node, self.residents, self.resident_views)

    def _view(
        self, node: fx.Node, roots: dict[fx.Node, fx.Node], views: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        """`node` as a view of one of the roots, through the recorded chain of views."""
        if node in roots:
            return roots[node]
        if node in views:
            return views[node]
        above = self.program.base.get(node)
        while above is not None:
            if _same_view(node, above):
                return self._view(above, roots, views)
            above = None if above in roots else self.program.base.get(above)
        source = self._reshaped_from(node, roots)
        if source is not None:
            args: Any = (self._view(source, roots, views), *node.args[1:])
        else:
            args = fx.node.map_arg(node.args, lambda a: self._view(a, roots, views))
        out = self._call(node.target, args, dict(node.kwargs), node.meta.get("val"))
        views[node] = out
        return out

    def _reshaped_from(self, node: fx.Node, roots: dict[fx.Node, fx.Node]) -> fx.Node | None:
        """For a reshape of reshapes: the tensor that the last one alone can start from."""
        if node.target is not aten.view.default:
            return None
        source = self.program.base.get(node)
        while source is not None and source not in roots and source.target in _RESHAPES:
            source = self.program.base.get(source)
        if source is None or not isinstance(source.meta.get("val"), torch.Tensor):
            return None
        like, wanted = source.meta["val"], node.meta["val"]
        trial = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        try:
            fits = trial.view(wanted.shape).stride() == wanted.stride()
        except RuntimeError:
            return None
        return source if fits and like.dtype == wanted.dtype else None

    def _output(self, node: fx.Node) -> fx.Node | None:
        storage = node.meta["storage"]
        for v in self.program.given:
            if self.values[v].storage == storage:
                copy = self.given.get(v, self.final.get(v))
                assert copy is not None
                buffer = self.buffers[copy]
                return self._view(node, buffer.roots, buffer.views)
        return None

    def _gradient(self, node: fx.Node) -> fx.Node:
        copy = self.final_copy.get(node.meta["storage"])
        if copy is None:
            return self._resident(node)
        buffer = self.buffers[copy]
        return self._view(node, buffer.roots, buffer.views)

    def _last_replays(self) -> dict[int, int]:
        """Op -> the last step that runs it again, for random ops that run more than once."""
        random = {
            i
            for i, runs in self.runs.items()
            if runs > 1 and any(effects.is_random(n.target) for n in self.program.ops[i].nodes)
        }
        return {i: t for t, i in enumerate(self.steps) if i in random}


_SHARE_BYTES = 1 << 16  # gradients below this in all are not worth a call of their own

_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.detach.default})


def _same_view(node: fx.Node, other: fx.Node) -> bool:
    """Two nodes that show the same elements in the same way."""
    a, b = node.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return bool(
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
