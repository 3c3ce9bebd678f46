"""JointGraph -> its storages, and what each op does to them, in the recorded order.

A storage is taken from one state to the next by what writes to it; a call that only shows storages
that are there is a view, and no op.
"""

import operator
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from rekindle.capture import op_effects
from rekindle.capture.joint import JointGraph
from rekindle.capture.node_facts import NO_STORAGE, NodeFacts, facts, source_of
from rekindle.errors import CaptureError

_getitem = operator.getitem
Phase = Literal["forward", "loss", "backward"]


@dataclass(slots=True)
class StorageOp:
    """An op by what it does to storages; tokens are the order that data does not carry."""

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


class Storages:
    """The first walk over a joint graph: which storages there are, and which op reads, makes and
    writes each of them in which state."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.resident: set[int] = set()  # there all the time
        self.tangents: list[int] = []  # made by the loss
        self.sizes: dict[int, int] = {}
        self.names: dict[int, str] = {}
        self.roots: dict[int, list[fx.Node]] = {}  # the nodes whose tensors own it
        self.base: dict[fx.Node, fx.Node] = {}  # view -> what it is a view of
        self.state: dict[int, int] = {}  # the last one
        self.ops: list[StorageOp] = []
        self.out_states: dict[int, int] = {}  # of the model's outputs when the forward ends
        self._walk()

    def _walk(self) -> None:
        in_backward = False
        for node in self.joint.nodes:
            if node.op == "placeholder":
                if source_of(node).kind == "tangent" and not in_backward:
                    in_backward = True
                    self._loss()
                self._placeholder(node)
            elif node.target is not _getitem:
                self._call(node)
            elif (known := facts(node)).storage != NO_STORAGE:
                self._part(node, known)
        if not in_backward:
            self.out_states = self._output_states()

    def _new_storage(self, node: fx.Node, known: NodeFacts) -> int:
        storage = known.storage
        if storage not in self.sizes:
            self.sizes[storage] = known.storage_bytes
            self.names[storage] = node.name
            self.roots[storage] = []
            self.state[storage] = 0
        self.roots[storage].append(node)
        return storage

    def _placeholder(self, node: fx.Node) -> None:
        storage = self._new_storage(node, facts(node))
        source = source_of(node)
        self.names[storage] = source.name
        if source.kind == "tangent":
            self.tangents.append(storage)
            self.ops[-1].makes[storage] = 0
        else:
            self.resident.add(storage)

    def _part(self, node: fx.Node, known: NodeFacts) -> None:
        """One output of a call with several."""
        call = node.args[0]
        assert isinstance(call, fx.Node)
        if call in self.base:  # a view with several outputs, such as split
            self.base[node] = call
        elif known.storage in self.sizes and known.storage not in self.ops[-1].makes:
            raise CaptureError(
                f"{call.target} gives back an alias of its argument beside new tensors; "
                "such ops cannot be planned"
            )
        else:
            self.ops[-1].makes[self._new_storage(node, known)] = 0

    def _call(self, node: fx.Node) -> None:
        known = facts(node)
        written = {facts(n).storage for n in known.writes} if known.writes else set()
        made = _made_storages(node, known)
        if not written and made and all(s in self.sizes for s in made):
            self.base[node] = _viewed(node, set(made))
            return
        assert known.phase is not None
        op = StorageOp([node], known.phase)
        for argument in node.all_input_nodes:
            storage = facts(argument).storage
            if storage in self.resident:
                op.resident_reads.add(storage)
            else:
                op.reads[storage] = self.state[storage]
        self.ops.append(op)
        for storage in sorted(written):
            # Outputs of one call that share memory: which of them changes with a write cannot be
            # told.
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
        if known.storage != NO_STORAGE and known.storage not in self.sizes:
            op.makes[self._new_storage(node, known)] = 0
        op.random = op_effects.is_random(node.target)
        statistics = {facts(node.args[p]).storage for p in op_effects.statistics_positions(node)}
        # Running statistics may be left out of a second run, so writing them does not bind an op to
        # one run. An op that makes nothing and writes nothing is run for an effect that is not
        # seen.
        op.once = (
            op_effects.runs_once(node.target) or bool(op.resident_writes - statistics) or not made
        )

    def _loss(self) -> None:
        op = StorageOp([], "loss", once=True)
        self.out_states = self._output_states()
        # The loss reads all outputs in the state that they have when the forward ends.
        op.reads.update(self.out_states)
        self.ops.append(op)

    def _output_states(self) -> dict[int, int]:
        storages = [facts(n).storage for n in self.joint.outputs]
        return {s: self.state[s] for s in storages if s not in self.resident}

    def gradient_states(self) -> dict[int, int]:
        storages = [facts(g).storage for _, g in self.joint.gradients]
        return {s: self.state[s] for s in storages if s not in self.resident}


def _made_storages(node: fx.Node, known: NodeFacts) -> list[int]:
    """The storages of the tensors that this call gives back, written arguments aside."""
    if known.storage != NO_STORAGE:
        return [known.storage]
    parts = [facts(user).storage for user in node.users if user.target is _getitem]
    made = [storage for storage in parts if storage != NO_STORAGE]
    return made or [facts(n).storage for n in known.writes]


def _viewed(node: fx.Node, made: set[int]) -> fx.Node:
    """The argument whose storage this view shows."""
    for argument in node.all_input_nodes:
        if facts(argument).storage in made:
            return argument
    raise CaptureError(f"{node.target} shows a storage that is none of its arguments'")
