"""Steps of a schedule -> calls in the graphs of `emit`, one graph after the other.

Each copy of a value is the result of the step that made it (`lifetimes`). Views are re-made from
the copy they look at and kept as long as they are used (`graph_writer`).

- A step whose op writes in place runs as recorded where the old state dies there, and on a copy of
  the storage elsewhere.
- A random op that runs again keeps the generator's state of its first run and replays it.
- Batch norm that runs again leaves its running statistics alone.
"""

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rekindle.capture import op_effects
from rekindle.capture.node_facts import NO_STORAGE, facts, source_of
from rekindle.capture.random_streams import own_generator
from rekindle.core import HostLayout
from rekindle.core.schedule import Step
from rekindle.lower.graph_writer import GraphWriter, Tensors
from rekindle.lower.host_steps import HostSteps
from rekindle.lower.lifetimes import Lifetimes
from rekindle.lower.runtime_ops import replay, rng_state
from rekindle.program.program import InPlace, Program, ProgramOp
from rekindle.rewrite.layer_norm import sum_and_norm


@dataclass(frozen=True, slots=True)
class Saved:
    """One entry of the list that the forward leaves: a tensor, or the state of the random stream
    before `node` ran."""

    node: fx.Node  # the root whose tensor it is, or the random op
    state: int  # of the storage; -1 for a random state


@dataclass(frozen=True, slots=True)
class Carried:
    """What one graph hands to the next."""

    node: fx.Node  # the root whose tensor it is, or the random op
    copy: int | None  # None: the state of the random stream before the op's first run


class Emitter:
    """Writes steps into graphs, one graph after the other: `begin`, `step`..., `end`."""

    writer: GraphWriter  # of the graph being written

    def __init__(
        self,
        program: Program,
        steps: Sequence[Step],
        lives: Lifetimes,
        replays: Mapping[fx.Node, int],
        seen: Iterable[int] = (),
        joined: Container[int] = (),
        layout: HostLayout | None = None,
    ) -> None:
        self.program = program
        self.steps = steps
        self.lives = lives
        self.replays = replays  # random op -> the last step that needs its state
        self.seen = set(seen)  # ops that have run
        self.joined = joined  # steps that are one call with the next
        self.host = HostSteps(layout or HostLayout())
        self.buffers: dict[int, Tensors] = {}  # copy -> its tensors in the graph being written
        self.random: dict[fx.Node, fx.Node] = {}  # random op -> the state before its first run
        self.tangents = {
            source_of(n).index: n
            for n in program.joint.nodes
            if n.op == "placeholder" and source_of(n).kind == "tangent"
        }
        self._gradient_of = dict(program.joint.gradients)
        self.leaves: dict[fx.Node, int] = {}  # see `_find_leaves`
        self._handed_out: dict[int, int] = {}
        self._find_leaves()
        self._saved_at: dict[int, list[int]] = {}  # copy -> positions in the saved list
        self.written: set[int] = set()  # positions in the saved list that are written over
        self._place: dict[int, Tensors] = {}  # storage -> the tensors that a step sees

    def _find_leaves(self) -> None:
        """`leaves`: placeholder -> the step after which nothing reads its gradient any more;
        `_handed_out`: copy -> the last such step of the gradients that it is."""
        lives = self.lives
        for leaf, gradient in self.program.joint.gradients:
            copy = lives.results.get(facts(gradient).storage)
            step = lives.loss_step if copy is None else lives.copies[copy].last_read
            self.leaves[leaf] = max(step, lives.loss_step + 1)
            if copy is not None:
                self._handed_out[copy] = max(self.leaves[leaf], self._handed_out.get(copy, -1))

    # ---- graphs

    def begin(self, carried: Sequence[Carried | None] = (), tangents: Sequence[int] = ()) -> None:
        """A new graph. Its first inputs are what is carried, None for what is not needed, and the
        tangents that arrive."""
        self.writer = GraphWriter(self.program)
        self.host.begin(self.writer)
        # The same copies are alive, but nodes belong to one graph: each is a placeholder here, or
        # is not read here.
        self.buffers = {copy: Tensors() for copy in self.buffers}
        for position, item in enumerate(carried):
            name = f"carried_{position}"
            if item is None:
                self.writer.placeholder(name)
            elif item.copy is None:
                self.random[item.node] = self.writer.placeholder(name)
            else:
                node = self.writer.placeholder(name, facts(item.node))
                self.buffers.setdefault(item.copy, Tensors()).roots[item.node] = node
        for position, index in enumerate(tangents, len(carried)):
            root = self.tangents[index]
            node = self.writer.placeholder(f"carried_{position}", facts(root))
            self.buffers[self._tangent_copy(root)] = Tensors({root: node})

    def end(
        self, results: Sequence[fx.Node], carried: Sequence[Carried] = ()
    ) -> tuple[Callable[[list[Any]], Any], str]:
        """The function of the graph that gives the results and what is carried, and its source."""
        outs = [
            self.random[item.node]
            if item.copy is None
            else self.buffers[item.copy].roots[item.node]
            for item in carried
        ]
        return self.writer.finish([*results, *outs])

    def carried(self, stop: int) -> list[Carried]:
        """What later graphs read: copies made before `stop` and used at or after it, and states of
        the random stream. The rest is forgotten."""
        self.buffers = {c: b for c, b in self.buffers.items() if self._needed_after(c, stop)}
        # A state outlives the first run only as long as a later run replays it.
        self.random = {n: s for n, s in self.random.items() if self.replays.get(n, -1) >= stop}
        items = [
            Carried(root, copy) for copy, buffer in self.buffers.items() for root in buffer.roots
        ]
        return items + [Carried(node, None) for node in self.random]

    def _needed_after(self, copy: int, stop: int) -> bool:
        if self.lives.copies[copy].made >= stop:
            return False
        if self.lives.copies[copy].last_read >= stop:
            return True
        # A gradient is carried until the stretch that hands it out.
        return self._handed_out.get(copy, -1) >= stop

    def saved(self, item: Carried) -> Saved:
        if item.copy is None:
            return Saved(item.node, -1)
        return Saved(item.node, self.program.values[self.lives.copies[item.copy].value].state)

    def watch(self, carried: Sequence[Carried | None]) -> None:
        """From here on `written` tells what is written over of this list, which the forward has
        left."""
        for position, item in enumerate(carried):
            if item is not None and item.copy is not None:
                self._saved_at.setdefault(item.copy, []).append(position)

    def tangents_read(self) -> list[int]:
        storages = {facts(g).storage for _, g in self.program.joint.gradients}
        found = []
        for index, root in self.tangents.items():
            read = self.lives.copies[self._tangent_copy(root)].last_read > self.lives.loss_step
            if read or facts(root).storage in storages:
                found.append(index)
        return found

    def _tangent_copy(self, root: fx.Node) -> int:
        loss_step = self.lives.loss_step
        # The loss op stands for the caller's work: what it makes are the gradients that arrive.
        _, op = self._op(loss_step)
        return self.lives.makes[loss_step][op.makes[facts(root).storage]]

    # ---- what leaves

    def output(self, node: fx.Node) -> fx.Node | None:
        """An output of the model; None where the graph does not make it."""
        storage = facts(node).storage
        for v in self.program.given:
            if self.program.values[v].storage == storage:
                copy = self.lives.given.get(v, self.lives.final.get(v))
                assert copy is not None
                self.host.hand_out(copy, self.buffers)
                return self.writer.view(node, self.buffers[copy])
        return None

    def gradient(self, leaf: fx.Node) -> fx.Node:
        node = self._gradient_of[leaf]
        copy = self.lives.results.get(facts(node).storage)
        if copy is None:
            return self.writer.resident(node)
        self.host.hand_out(copy, self.buffers)
        return self.writer.view(node, self.buffers[copy])

    # ---- steps

    def _op(self, t: int) -> tuple[int, ProgramOp]:
        """The op of a step, and its id."""
        i = self.steps[t]
        assert isinstance(i, int), f"step {t} is the transfer {i}"
        return i, self.program.ops[i]

    def run(self, begin: int, stop: int) -> None:
        t = begin
        while t < stop:
            if t in self.joined and t + 1 < stop:
                self._sum_and_norm(t)
                t += 2
            else:
                if isinstance(self.steps[t], int):
                    self.step(t)
                else:
                    self._transfer(t)
                t += 1

    def _transfer(self, t: int) -> None:
        reads, makes = self.lives.reads[t], self.lives.makes[t]
        copies = [*reads.values(), *makes.values()]
        self.host.write(t, self.steps[t], copies[0] if copies else None, self.buffers)
        self._forget_dead(t)

    def step(self, t: int) -> None:
        (i, op), lives = self._op(t), self.lives
        first = i not in self.seen
        self.seen.add(i)
        reads = lives.reads[t]
        self.host.wait_for(reads.values())
        self._place = {s: self.buffers[reads[value]] for s, value in op.reads.items()}
        # Writing over an argument is allowed by the graph (`program.inplace`) and used where this
        # schedule lets the argument die here: elsewhere the op runs as eager runs it, into a new
        # block.
        if op.instead is not None and lives.dies(reads[op.instead.source], t):
            self._note_written(reads[op.instead.source])
            self._emit_instead(op.nodes[0], op.instead)
        else:
            for storage in op.writes:
                old = reads[op.reads[storage]]
                if lives.dies(old, t):
                    self._note_written(old)
                else:
                    # Another run reads the old contents later, so they must stay as they are.
                    self._place[storage] = self.writer.copied(self.buffers[old])
            for node in op.nodes:
                self._emit_call(node, op, t, first)
        self._settle(t)

    def _settle(self, t: int) -> None:
        """What the step has made is there, and what dies with it is gone."""
        lives, (_, op) = self.lives, self._op(t)
        for storage, value in op.makes.items():
            self.buffers[lives.makes[t][value]] = self._place[storage]
        self.host.made(op.makes.values())
        self._forget_dead(t)

    def _forget_dead(self, t: int) -> None:
        lives = self.lives
        for copy in (*lives.reads[t].values(), *lives.makes[t].values()):
            if lives.dies(copy, t):
                self.buffers.pop(copy, None)

    def _sum_and_norm(self, t: int) -> None:
        """A sum and the layer norm that reads it, in one call."""
        (i, first), (j, second) = self._op(t), self._op(t + 1)
        total, norm = first.nodes[0], second.nodes[0]
        self.seen |= {i, j}
        reads = self.lives.reads[t]
        self.host.wait_for([*reads.values(), *self.lives.reads[t + 1].values()])
        self._place = {
            s: self.buffers[copies[value]]
            for op, copies in ((first, reads), (second, self.lives.reads[t + 1]))
            for s, value in op.reads.items()
            if copies[value] in self.buffers
        }
        # The sum is made inside the one call: the norm does not read it from a buffer.
        args = [self._tensor(n) for n in (*total.args, *norm.args[2:4])]
        args.append(norm.args[4])
        if first.instead is not None and self.lives.dies(reads[first.instead.source], t):
            self._note_written(reads[first.instead.source])
            args.append(self._tensor(first.instead.out))
        made = self.writer.call(sum_and_norm, tuple(args), {})
        tensor = self.writer.call(operator.getitem, (made, 0), {}, facts(total))
        self._place[facts(total).storage] = Tensors({total: tensor})
        self._take_parts(norm, made, 1, second, t + 1)
        self._settle(t)
        self._settle(t + 1)

    def _note_written(self, copy: int) -> None:
        self.written.update(self._saved_at.get(copy, ()))

    def _emit_instead(self, node: fx.Node, instead: InPlace) -> None:
        args: tuple[Any, ...] = fx.node.map_arg(instead.args, self._tensor)
        kwargs = {**fx.node.map_arg(node.kwargs, self._tensor)}
        kwargs[instead.out_name] = self._tensor(instead.out)
        out = self.writer.call(instead.call, args, kwargs, facts(node))
        self._place[facts(node).storage] = Tensors({node: out})

    def _emit_call(self, node: fx.Node, op: ProgramOp, t: int, first: bool) -> None:
        given = list(node.args)
        if not first:
            # Batch norm updates its running statistics as it runs. A second run without them
            # computes the same outputs in training mode; with them they would move twice per step,
            # as they do under torch.utils.checkpoint (pytorch #96136). Statistics that the step
            # itself made (instance norm's, one row per sample) are values like any other: a run
            # takes their old state to the new one, and what reads it may read the last run's.
            for position in op_effects.statistics_positions(node):
                if facts(node.args[position]).storage not in op.makes:
                    given[position] = None
        args: tuple[Any, ...] = fx.node.map_arg(tuple(given), self._tensor)
        kwargs = fx.node.map_arg(node.kwargs, self._tensor)
        target: Any = node.target
        if node in self.replays:
            # Without the replay a second run of dropout would draw another mask, and the gradients
            # would be wrong in silence (as in pytorch #190758).
            stream = own_generator(node) or _device(node)
            if first:
                self.random[node] = self.writer.call(rng_state, (stream,), {})
            else:
                target, args = replay, (node.target, stream, self.random[node], *args)
        known = facts(node)
        out = self.writer.call(target, args, kwargs, known)
        if known.storage != NO_STORAGE:
            if known.storage in op.makes:
                self._place.setdefault(known.storage, Tensors()).roots[node] = out
            return
        self._take_parts(node, out, 0, op, t)

    def _take_parts(self, node: fx.Node, made: fx.Node, offset: int, op: ProgramOp, t: int) -> None:
        """The outputs of an op that has several, which begin there in what was made."""
        for user in node.users:
            if user.target is operator.getitem and facts(user).storage in op.makes:
                tensors = self._place.setdefault(facts(user).storage, Tensors())
                # An output that nobody reads gets no name: a name would hold its memory until the
                # graph ends.
                if self._is_read(user, op, t):
                    part = (made, offset + user.args[1])
                    tensors.roots[user] = self.writer.call(operator.getitem, part, {}, facts(user))

    def _is_read(self, part: fx.Node, op: ProgramOp, t: int) -> bool:
        copy = self.lives.makes[t][op.makes[facts(part).storage]]
        return not self.lives.dies(copy, t) or len(op.nodes) > 1

    def _tensor(self, node: fx.Node) -> fx.Node:
        """The tensor of a recorded node at this step: its copy, and the view of it."""
        place = self._place.get(self.writer.storage(node))
        return self.writer.resident(node) if place is None else self.writer.view(node, place)


def _device(node: fx.Node) -> torch.device:
    val = facts(node).value
    first = next(v for v in (val if isinstance(val, (list, tuple)) else (val,)) if v is not None)
    return torch.device(first.device)
