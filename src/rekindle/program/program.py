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

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from rekindle.capture import op_effects
from rekindle.capture.joint import JointGraph
from rekindle.capture.node_facts import facts
from rekindle.errors import NothingToPlan
from rekindle.program import inplace
from rekindle.program.storages import Phase, StorageOp, Storages
from rekindle.torch_compat import is_overload


@dataclass(frozen=True, slots=True)
class ProgramValue:
    """One storage in one state, or a token: a value without size that orders two ops."""

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
    """One op of a problem, with the nodes that it runs."""

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
    """A joint graph as ops over storages: problems are formulated and code is written from it."""

    joint: JointGraph
    values: tuple[ProgramValue, ...]
    ops: tuple[ProgramOp, ...]
    outputs: tuple[int, ...]
    given: tuple[int, ...]  # what the caller gets: the model's outputs, where the graph makes them
    held: tuple[int, ...]  # of those, what the caller is taken to keep through the backward
    roots: dict[int, tuple[fx.Node, ...]]  # storage -> the nodes whose tensors own it
    base: dict[fx.Node, fx.Node]  # view -> what it is a view of

    def __str__(self) -> str:
        """A line per op: the ids of the values that it reads and makes."""
        lines = [
            f"op {i}: {op.name}: {_ids(op.inputs)} -> {_ids(op.outputs)}"
            + ("" if op.recomputable else ", runs once")
            + (f", gradient of op {op.grad_of}" if op.grad_of is not None else "")
            for i, op in enumerate(self.ops)
        ]
        resident = [v for v, value in enumerate(self.values) if value.resident]
        return "\n".join([*lines, f"resident: {_ids(resident)}", f"outputs: {_ids(self.outputs)}"])


def _ids(values: Iterable[int]) -> str:
    return " ".join(f"v{v}" for v in values) or "nothing"


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
        self.storages = Storages(joint)
        self.ops = self.storages.ops

    def program(self) -> Program:
        self._drop_dead()
        self._merge_in_place_chains()
        self._order_effects()
        return self._finish()

    # ---- what nobody needs

    def _drop_dead(self) -> None:
        needed = set(self.storages.gradient_states().items())
        if self.joint.forward_only:
            needed |= set(self.storages.out_states.items())
        kept = []
        # Backwards, so that what an op reads is known to be needed before its maker is met.
        for op in reversed(self.ops):
            if op.effect or any(item in needed for item in op.makes.items()):
                needed |= set(op.reads.items())
                kept.append(op)
        self.ops = kept[::-1]

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
                    # Nor may a read of a parameter or buffer move before a write to it.
                    and not (op.resident_reads & written)
                    # Joined ops run at the place of the first: a random op must not overtake
                    # another one's draw.
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
    def _join(first: StorageOp, second: StorageOp, item: tuple[int, int]) -> None:
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
                current[s] = f"{self.storages.names[s]} written by {i}"
                op.tokens_out.append(current[s])
            for s in sorted(touched - op.resident_writes):
                if op.phase == "forward":
                    op.once = True
                    token = f"{self.storages.names[s]} read by {i}"
                    reads_since[s].append(token)
                    op.tokens_out.append(token)
            if op.random:
                if stream:
                    op.tokens_in.append(stream)
                stream = f"random {i}"
                op.tokens_out.append(stream)
            if any(op_effects.runs_once(n.target) for n in op.nodes):  # in the order of all ranks
                if world:
                    op.tokens_in.append(world)
                world = f"collective {i}"
                op.tokens_out.append(world)
            if op.once and not (op.makes or op.tokens_out):
                op.tokens_out.append(f"done {i}")
            # So that no effect of the forward is put off into the backward, or dropped.
            if op.phase == "forward" and op.effect:
                loss_tokens += op.tokens_out
        self.final_tokens = [*loss_tokens, *([stream] if stream else [])]

    # ---- ids

    def _finish(self) -> Program:
        storages = self.storages
        values: list[ProgramValue] = []
        state_ids: dict[tuple[int, int], int] = {}
        token_ids: dict[str, int] = {}
        resident_ids: dict[int, int] = {}
        read = {s for op in self.ops for s in op.resident_reads}
        # Ids of values: residents first, then in the order in which ops make them.
        for s in sorted(storages.resident & read):
            resident_ids[s] = len(values)
            values.append(ProgramValue(storages.names[s], storages.sizes[s], s, resident=True))
        op_of_sequence = self._op_of_sequence()
        over = _WriteOver(self)
        ops: list[ProgramOp] = []
        for i, op in enumerate(self.ops):
            for s, state in op.makes.items():
                name = storages.names[s] + (f".{state}" if state else "")
                state_ids[s, state] = len(values)
                values.append(ProgramValue(name, storages.sizes[s], s, state=state))
            for token in op.tokens_out:
                token_ids[token] = len(values)
                values.append(ProgramValue(token, 0, None))
            reads = {s: state_ids[s, k] for s, k in op.reads.items()}
            makes = {s: state_ids[s, k] for s, k in op.makes.items()}
            inputs = [*reads.values()]
            inputs += [resident_ids[s] for s in sorted(op.resident_reads)]
            inputs += [token_ids[t] for t in op.tokens_in]
            if op.phase == "loss" and not op.makes:
                raise NothingToPlan("no output of the model takes part in the backward")
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
                    grad_of=op_of_sequence.get(facts(op.nodes[0]).sequence_nr)
                    if op.phase == "backward"
                    else None,
                )
            )
        given = [state_ids[item] for item in storages.out_states.items()]
        if self.joint.forward_only:
            given += [token_ids[t] for t in self.final_tokens]
            outputs, held = given, []
        else:
            outputs = [state_ids[item] for item in storages.gradient_states().items()]
            scalars = {facts(n).storage for n in self.joint.outputs if facts(n).value.dim() == 0}
            held = [v for v in given if self.hold_outputs or values[v].storage in scalars]
        return Program(
            joint=self.joint,
            values=tuple(values),
            ops=tuple(ops),
            outputs=tuple(dict.fromkeys(outputs)),
            given=tuple(dict.fromkeys(given)),
            held=tuple(dict.fromkeys(held)),
            roots={s: tuple(nodes) for s, nodes in storages.roots.items()},
            base=storages.base,
        )

    def _op_of_sequence(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for i, op in enumerate(self.ops):
            if op.phase == "forward":
                for node in op.nodes:
                    # Ops that autograd does not see take the number of the next one that it does:
                    # the first op of a number is the one whose gradient it is.
                    found.setdefault(facts(node).sequence_nr, i)
        return found


class _WriteOver:
    """Where an op's result may take the place of an argument: of those that fit, one that dies in
    eager's order, since most schedules will let it die too."""

    def __init__(self, analysis: _Analysis) -> None:
        self.last_read: dict[tuple[int, int], int] = {}
        for i, op in enumerate(analysis.ops):
            for item in op.reads.items():
                self.last_read[item] = i
        self.kept = set(analysis.storages.gradient_states().items())
        # Not over what the caller has a hand on.
        self.foreign = {*analysis.storages.tangents, *analysis.storages.out_states}
        # Nor over what a hook of the model's, or a sparse gradient, keeps.
        self.foreign |= {
            storage
            for op in analysis.ops
            for node in op.nodes
            if getattr(node.target, "keeps_arguments", False)
            for storage in op.reads
        }

    def instead(
        self, i: int, op: StorageOp, reads: dict[int, int], makes: dict[int, int]
    ) -> InPlace | None:
        node = op.nodes[0] if len(op.nodes) == 1 else None
        if node is None or op.writes or op.resident_writes or op.once:
            return None
        options = []
        for over in inplace.candidates(node):
            storage = facts(over.argument).storage
            if storage in reads and storage not in self.foreign:
                item = (storage, op.reads[storage])
                dies = self.last_read.get(item) == i and item not in self.kept
                options.append((not dies, over))
        if not options:
            return None
        _, over = min(options, key=lambda option: option[0])
        source, target = reads[facts(over.argument).storage], makes[facts(node).storage]
        return InPlace(source, target, over.target, node.args, over.argument, over.out_name)


def _op_name(op: StorageOp, i: int) -> str:
    if not op.nodes:
        return "loss"
    names = [
        str(n.target) if is_overload(n.target) else getattr(n.target, "__name__", str(n.target))
        for n in op.nodes
    ]
    module = facts(op.nodes[0]).module
    return f"{'+'.join(names)}#{i}" + (f" {module}" if module else "")
