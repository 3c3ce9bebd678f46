"""JointGraph -> `Program`: the graph as storages and ops, the form that can be scheduled.

A value is one storage in one state. Views are folded into the storage they look at. An op that
writes in place takes the storage from one state to the next: where the old state dies with it the
op runs as eager ran it, else on a copy. Order that data does not carry stands as values without
size ("tokens"):

- random ops form a chain, so that their first runs draw from the stream in eager's order;
- what writes to a parameter, buffer or argument runs once, after every op that reads the old
  contents; those readers run once as well, since the old contents are gone afterwards, and since a
  second forward may come before the backward;
- the loss op reads every such token: effects of the forward happen in the forward.

Batch norm, which writes its running statistics, may run again: then without them.
"""

import operator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from rekindle.capture import effects, inplace
from rekindle.capture.joint import JointGraph
from rekindle.errors import CaptureError
from rekindle.torch_compat import is_overload

aten = torch.ops.aten
_getitem = operator.getitem
Phase = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, slots=True)
class ProgramValue:
    name: str
    size_bytes: int
    storage: int | None  # None for a token
    resident: bool = False
    state: int = 0  # how often the storage was written to before


@dataclass(frozen=True, slots=True)
class InPlace:
    """An op that may write its output over an argument that dies: what to call instead."""

    source: int  # value ids
    target: int
    call: object
    args: tuple[object, ...]
    out: fx.Node  # the argument
    out_name: str


@dataclass(frozen=True, slots=True)
class ProgramOp:
    name: str
    nodes: tuple[fx.Node, ...]  # run one after the other; empty for the loss op
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase
    reads: dict[int, int]  # storage -> value
    makes: dict[int, int]  # storage -> value
    writes: frozenset[int]  # storages among `makes` that are taken over from `reads` in place
    recomputable: bool = True
    instead: InPlace | None = None
    grad_of: int | None = None

    @property
    def inplace(self) -> tuple[tuple[int, int], ...]:
        pairs = [(self.reads[s], self.makes[s]) for s in sorted(self.writes)]
        if self.instead is not None:
            pairs.append((self.instead.source, self.instead.target))
        return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Program:
    joint: JointGraph
    values: tuple[ProgramValue, ...]
    ops: tuple[ProgramOp, ...]
    outputs: tuple[int, ...]
    given: tuple[int, ...]  # what the caller gets: the model's outputs, where the graph makes them
    held: tuple[int, ...]  # of those, what the caller is taken to keep through the backward
    roots: dict[int, tuple[fx.Node, ...]]  # storage -> the nodes whose tensors own it
    base: dict[fx.Node, fx.Node]  # view -> what it is a view of


@dataclass(slots=True)
class _Op:
    """An op under construction."""

    nodes: list[fx.Node]
    phase: Phase
    reads: dict[int, int] = field(default_factory=dict)  # internal storage -> state
    makes: dict[int, int] = field(default_factory=dict)
    writes: set[int] = field(default_factory=set)
    resident_reads: set[int] = field(default_factory=set)
    resident_writes: set[int] = field(default_factory=set)
    once: bool = False
    random: bool = False
    tokens_in: list[str] = field(default_factory=list)
    tokens_out: list[str] = field(default_factory=list)

    @property
    def effect(self) -> bool:
        return self.once or bool(self.resident_writes) or (self.random and self.phase == "forward")


def analyse(joint: JointGraph, *, hold_outputs: bool = True, random_once: bool = False) -> Program:
    """`hold_outputs`: the caller keeps all outputs while the backward runs. Else only what has no
    weight, such as the loss; the others are gone unless the backward reads them. `random_once`:
    random ops must not run again."""
    return _Analysis(joint, hold_outputs, random_once).program()


class _Analysis:
    def __init__(self, joint: JointGraph, hold_outputs: bool, random_once: bool) -> None:
        self.joint = joint
        self.hold_outputs = hold_outputs
        self.random_once = random_once
        self.resident: set[int] = set()
        self.tangents: list[int] = []
        self.sizes: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.roots: dict[int, list[fx.Node]] = {}
        self.base: dict[fx.Node, fx.Node] = {}
        self.state: dict[int, int] = {}
        self.ops: list[_Op] = []
        self.out_states: dict[int, int] = {}

    def program(self) -> Program:
        self._walk()
        self._drop_dead()
        self._merge_in_place_chains()
        self._order_effects()
        return self._finish()

    # ---- storages, states and ops, in the recorded order

    def _walk(self) -> None:
        in_backward = False
        for node in self.joint.nodes:
            if node.op == "placeholder":
                if node.meta["source"].kind == "tangent" and not in_backward:
                    in_backward = True
                    self._loss()
                self._placeholder(node)
            elif "storage" in node.meta and node.target is _getitem:
                self._part(node)
            elif node.target is not _getitem:
                self._call(node)
        if not in_backward:
            self.out_states = self._output_states()

    def _new_storage(self, node: fx.Node) -> int:
        storage = node.meta["storage"]
        if storage not in self.sizes:
            self.sizes[storage] = node.meta["storage_bytes"]
            self.names[storage] = node.name
            self.roots[storage] = []
            self.state[storage] = 0
        self.roots[storage].append(node)
        return int(storage)

    def _placeholder(self, node: fx.Node) -> None:
        storage = self._new_storage(node)
        source = node.meta["source"]
        self.names[storage] = source.name
        if source.kind == "tangent":
            self.tangents.append(storage)
            self.ops[-1].makes[storage] = 0
        else:
            self.resident.add(storage)

    def _part(self, node: fx.Node) -> None:
        """One output of a call with several."""
        call = node.args[0]
        assert isinstance(call, fx.Node)
        if call in self.base:  # a view with several outputs, such as split
            self.base[node] = call
        elif node.meta["storage"] in self.sizes and node.meta["storage"] not in self.ops[-1].makes:
            raise CaptureError(
                f"{call.target} gives back an alias of its argument beside new tensors; "
                "such ops cannot be planned"
            )
        else:
            storage = self._new_storage(node)
            self.ops[-1].makes[storage] = 0

    def _call(self, node: fx.Node) -> None:
        written = {n.meta["storage"] for n in node.meta["writes"]}
        made = _made_storages(node)
        if not written and made and all(s in self.sizes for s in made):
            self.base[node] = _viewed(node)
            return
        op = _Op([node], node.meta["phase"])
        for argument in node.all_input_nodes:
            storage = argument.meta["storage"]
            if storage in self.resident:
                op.resident_reads.add(storage)
            else:
                op.reads[storage] = self.state[storage]
        self.ops.append(op)
        for storage in sorted(written):
            if len(self.roots[storage]) > 1 and storage not in self.resident:
                raise CaptureError(
                    f"{node.target} writes into one of several outputs that share memory"
                )
            if storage in self.resident:
                op.resident_writes.add(storage)
            else:
                self.state[storage] += 1
                op.makes[storage] = self.state[storage]
                op.writes.add(storage)
        if "storage" in node.meta and node.meta["storage"] not in self.sizes:
            storage = self._new_storage(node)
            op.makes[storage] = 0
        op.random = effects.is_random(node.target)
        statistics = {node.args[p].meta["storage"] for p in effects.statistics_positions(node)}
        op.once = (
            effects.runs_once(node.target) or bool(op.resident_writes - statistics) or not made
        )

    def _loss(self) -> None:
        op = _Op([], "loss", once=True)
        self.out_states = self._output_states()
        op.reads.update(self.out_states)
        self.ops.append(op)

    def _output_states(self) -> dict[int, int]:
        storages = [n.meta["storage"] for n in self.joint.outputs]
        return {s: self.state[s] for s in storages if s not in self.resident}

    # ---- what nobody needs

    def _drop_dead(self) -> None:
        needed = {(s, self.state[s]) for s in self._final_storages()}
        if self.joint.forward_only:
            needed |= set(self.out_states.items())
        kept = []
        for op in reversed(self.ops):
            if op.effect or any(item in needed for item in op.makes.items()):
                needed |= set(op.reads.items())
                kept.append(op)
        self.ops = kept[::-1]

    def _final_storages(self) -> list[int]:
        found = [g.meta["storage"] for _, g in self.joint.gradients]
        return [s for s in dict.fromkeys(found) if s not in self.resident]

    # ---- a fresh storage and what is done to it in place, as one op

    def _merge_in_place_chains(self) -> None:
        """An in-place op that reads nothing else joins the op that made the state it overwrites,
        where nobody else reads that state: `empty_like`, `bernoulli_`, `div_` are one op."""
        readers: dict[tuple[int, int], int] = {}
        for op in self.ops:
            for item in op.reads.items():
                readers[item] = readers.get(item, 0) + 1
        maker: dict[tuple[int, int], int] = {}
        last_random = -1
        gone: set[int] = set()
        written = {s for op in self.ops for s in op.resident_writes}
        for i, op in enumerate(self.ops):
            at = i
            if len(op.reads) == 1 and len(op.writes) == 1 and len(op.makes) == 1:
                item = next(iter(op.reads.items()))
                before = maker.get(item, -1)
                if (
                    before >= 0
                    and op.writes == {item[0]}
                    and readers[item] == 1
                    and self.ops[before].phase == op.phase != "loss"
                    and not op.once
                    and not op.resident_writes
                    and not (op.resident_reads & written)
                    and not (op.random and last_random > before)
                ):
                    self._join(self.ops[before], op, item)
                    gone.add(i)
                    at = before
            for made in op.makes.items():
                maker[made] = at
            if op.random:
                last_random = max(last_random, at)
        self.ops = [op for i, op in enumerate(self.ops) if i not in gone]

    @staticmethod
    def _join(first: _Op, second: _Op, item: tuple[int, int]) -> None:
        first.nodes += second.nodes
        first.makes[item[0]] = second.makes[item[0]]
        first.resident_reads |= second.resident_reads
        first.random |= second.random

    # ---- order without data

    def _order_effects(self) -> None:
        written = {s for op in self.ops for s in op.resident_writes}
        reads_since: dict[int, list[str]] = {s: [] for s in written}
        current: dict[int, str] = {}
        stream = world = ""
        loss_tokens: list[str] = []
        for i, op in enumerate(self.ops):
            if op.phase == "loss":
                op.tokens_in += [*loss_tokens, *([stream] if stream else [])]
                continue
            touched = op.resident_reads & written
            for s in sorted(touched):
                if s in current:
                    op.tokens_in.append(current[s])
            for s in sorted(op.resident_writes):
                op.tokens_in += reads_since[s]
                reads_since[s] = []
                current[s] = f"{self.names[s]} written by {i}"
                op.tokens_out.append(current[s])
            for s in sorted(touched - op.resident_writes):
                if op.phase == "forward":
                    op.once = True
                    token = f"{self.names[s]} read by {i}"
                    reads_since[s].append(token)
                    op.tokens_out.append(token)
            if op.random:
                if stream:
                    op.tokens_in.append(stream)
                stream = f"random {i}"
                op.tokens_out.append(stream)
            if any(effects.runs_once(n.target) for n in op.nodes):  # in the order of all ranks
                if world:
                    op.tokens_in.append(world)
                world = f"collective {i}"
                op.tokens_out.append(world)
            if op.once and not (op.makes or op.tokens_out):
                op.tokens_out.append(f"done {i}")
            if op.phase == "forward" and op.effect:
                loss_tokens += op.tokens_out
        self.final_tokens = [*loss_tokens, *([stream] if stream else [])]

    # ---- ids

    def _finish(self) -> Program:
        values: list[ProgramValue] = []
        state_ids: dict[tuple[int, int], int] = {}
        token_ids: dict[str, int] = {}
        resident_ids: dict[int, int] = {}
        read = {s for op in self.ops for s in op.resident_reads}
        for storage in sorted(self.resident):
            if storage in read:
                resident_ids[storage] = len(values)
                values.append(
                    ProgramValue(self.names[storage], self.sizes[storage], storage, resident=True)
                )
        op_of_sequence = self._op_of_sequence()
        over = _WriteOver(self)
        ops: list[ProgramOp] = []
        for i, op in enumerate(self.ops):
            for storage, state in op.makes.items():
                name = self.names[storage] + (f".{state}" if state else "")
                state_ids[storage, state] = len(values)
                values.append(ProgramValue(name, self.sizes[storage], storage, state=state))
            for token in op.tokens_out:
                token_ids[token] = len(values)
                values.append(ProgramValue(token, 0, None))
            reads = {s: state_ids[s, k] for s, k in op.reads.items()}
            makes = {s: state_ids[s, k] for s, k in op.makes.items()}
            inputs = [*reads.values()]
            inputs += [resident_ids[s] for s in sorted(op.resident_reads)]
            inputs += [token_ids[t] for t in op.tokens_in]
            if op.phase == "loss" and not op.makes:
                raise CaptureError("no output of the model takes part in the backward")
            ops.append(
                ProgramOp(
                    name=_op_name(op, i),
                    nodes=tuple(op.nodes),
                    inputs=tuple(dict.fromkeys(inputs)),
                    outputs=(*makes.values(), *(token_ids[t] for t in op.tokens_out)),
                    phase=op.phase,
                    reads=reads,
                    makes=makes,
                    writes=frozenset(op.writes & op.reads.keys()),
                    recomputable=not (op.once or (op.random and self.random_once)),
                    instead=over.instead(i, op, reads, makes),
                    grad_of=op_of_sequence.get(op.nodes[0].meta["seq_nr"])
                    if op.phase == "backward"
                    else None,
                )
            )
        if self.joint.forward_only:
            outputs = [state_ids[item] for item in self.out_states.items()]
            outputs += [token_ids[t] for t in dict.fromkeys(self.final_tokens)]
            given, held = list(outputs), []
        else:
            outputs = [state_ids[s, self.state[s]] for s in self._final_storages()]
            given = [state_ids[item] for item in self.out_states.items()]
            scalars = {n.meta["storage"] for n in self.joint.outputs if n.meta["val"].dim() == 0}
            held = [v for v in given if self.hold_outputs or values[v].storage in scalars]
        return Program(
            joint=self.joint,
            values=tuple(values),
            ops=tuple(ops),
            outputs=tuple(dict.fromkeys(outputs)),
            given=tuple(dict.fromkeys(given)),
            held=tuple(dict.fromkeys(held)),
            roots={s: tuple(nodes) for s, nodes in self.roots.items()},
            base=self.base,
        )

    def _op_of_sequence(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for i, op in enumerate(self.ops):
            if op.phase == "forward":
                for node in op.nodes:
                    # Ops that autograd does not see take the number of the next one that it does:
                    # the first op of a number is the one whose gradient it is.
                    found.setdefault(node.meta["seq_nr"], i)
        return found


class _WriteOver:
    """Where an op's result may take the place of an argument: of those that fit, one that dies in
    eager's order, since most schedules will let it die too."""

    def __init__(self, analysis: _Analysis) -> None:
        self.last_read: dict[tuple[int, int], int] = {}
        for i, op in enumerate(analysis.ops):
            for item in op.reads.items():
                self.last_read[item] = i
        self.kept = {(s, analysis.state[s]) for s in analysis._final_storages()}
        # Not over what the caller has a hand on.
        self.foreign = {*analysis.tangents, *analysis.out_states}

    def instead(
        self, i: int, op: _Op, reads: dict[int, int], makes: dict[int, int]
    ) -> InPlace | None:
        node = op.nodes[0] if len(op.nodes) == 1 else None
        if node is None or op.writes or op.resident_writes or op.once:
            return None
        options = []
        for over in inplace.candidates(node):
            storage = over.argument.meta["storage"]
            if storage in reads and storage not in self.foreign:
                item = (storage, op.reads[storage])
                dies = self.last_read.get(item) == i and item not in self.kept
                options.append((not dies, over))
        if not options:
            return None
        _, over = min(options, key=lambda option: option[0])
        source, target = reads[over.argument.meta["storage"]], makes[node.meta["storage"]]
        return InPlace(source, target, over.target, node.args, over.argument, over.out_name)


def _made_storages(node: fx.Node) -> list[int]:
    """The storages of the tensors that this call gives back, written arguments aside."""
    if "storage" in node.meta:
        return [node.meta["storage"]]
    parts = [u for u in node.users if u.target is _getitem and "storage" in u.meta]
    if parts:
        return [u.meta["storage"] for u in parts]
    return [n.meta["storage"] for n in node.meta["writes"]]


def _viewed(node: fx.Node) -> fx.Node:
    """The argument whose storage this view shows."""
    made = set(_made_storages(node))
    for argument in node.all_input_nodes:
        if argument.meta["storage"] in made:
            return argument
    raise CaptureError(f"{node.target} shows a storage that is none of its arguments'")


def _op_name(op: _Op, i: int) -> str:
    if not op.nodes:
        return "loss"
    names = [
        str(n.target) if is_overload(n.target) else getattr(n.target, "__name__", str(n.target))
        for n in op.nodes
    ]
    module = op.nodes[0].meta["module"]
    return f"{'+'.join(names)}#{i}" + (f" {module}" if module else "")
