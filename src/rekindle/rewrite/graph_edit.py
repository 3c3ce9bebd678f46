"""The copy of a recorded graph that the passes work on, and the edits that several of them make.

Exactness: an edit here moves what is computed or gives it a place of its own, and leaves every
number as it is; which ops may be exchanged is each pass's own condition.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts, set_facts
from rekindle.torch_compat import add_call

aten = torch.ops.aten

MIN_NUMEL = 1 << 18  # below this the launch is all that counts
ANYWHERE = False  # for tests: on a CPU the separate ops stand in for the kernels

# Op that writes over its first argument -> the same with an output of its own.
OUT_OF_PLACE = {aten.relu_.default: aten.relu.default, aten.add_.Tensor: aten.add.Tensor}


@dataclass(frozen=True)
class SplitOp:
    """What was there before an op was split in two: a node that was its first output."""

    op: fx.Node
    args: tuple[Any, ...]  # of the op
    unread: fx.Node  # the first output now


@dataclass(frozen=True)
class GraphEdit:
    """A graph that is worked on: its forward, and once that is finished, a backward behind it."""

    graph: fx.Graph
    new_storage: Callable[[], int]
    smallest: int  # elements; see MIN_NUMEL
    anywhere: bool  # see ANYWHERE
    results: tuple[fx.Node, ...] = ()  # what the step gives away: outputs and gradients
    forward: tuple[fx.Node, ...] | None = None  # None: it is the forward that is worked on
    num_before: int = 0  # nodes of the graph that stand before the backward
    # Of nodes that a later pass may find no partner for: what they were.
    split: dict[fx.Node, SplitOp] = field(default_factory=dict)

    @property
    def backward(self) -> tuple[fx.Node, ...]:
        """The nodes of the backward that is worked on, as they are now."""
        return () if self.forward is None else tuple(self.graph.nodes)[self.num_before :]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes of the step, as they are now. Another backward of the same forward, whose nodes
        are in the graph as well, is no part of it."""
        if self.forward is None:
            return tuple(self.graph.nodes)
        return (*self.forward, *self.backward)

    def described(self, node: fx.Node, like: fx.Node, made: fx.Node) -> fx.Node:
        """The node with what is known of another, and a storage of its own as large as `made`'s."""
        value, num_bytes = facts(made).value, facts(made).storage_bytes
        storage = self.new_storage()
        known = replace(
            facts(like), value=value, storage=storage, storage_bytes=num_bytes, writes=()
        )
        set_facts(node, known)
        return node

    def unread(self, op: fx.Node, made: fx.Node) -> fx.Node:
        """In the place of `made`, the first output of the op, one that nobody reads."""
        with self.graph.inserting_before(made):
            unread = self.graph.call_function(operator.getitem, (op, 0))
        return self.described(unread, made, made)

    def out_of_place(self, made: fx.Node, before: fx.Node, writers: list[fx.Node]) -> None:
        """The value is made as `before`; what is then done to it in place gets outputs of its own.
        All that reads the result reads `made`."""
        self.described(before, made, made)
        for op in writers[:-1]:
            op.target, op.args = OUT_OF_PLACE[op.target], (before, *op.args[1:])
            # Each write was to one storage; now each result has a storage of its own, as large.
            before = self.described(op, op, made)
        last = writers[-1]
        # `made` takes the place of the last write, so that all who read it afterwards still do, and
        # what reads it stands behind it.
        last.append(made)
        made.target, made.args = OUT_OF_PLACE[last.target], (before, *last.args[1:])
        self.graph.erase_node(last)

    def fits(self, *values: torch.Tensor) -> bool:
        """Whether a kernel of ours may work on these tensors: large, dense and of one dtype."""
        first = values[0]
        return (
            (self.anywhere or first.is_cuda)
            and first.numel() >= self.smallest
            # Kernels read vectors of up to 8 elements, from addresses that the allocator aligned.
            and first.numel() % 8 == 0
            and all(
                v.is_contiguous() and v.storage_offset() == 0 and v.dtype == first.dtype
                for v in values
            )
        )


def copy_nodes(graph: fx.Graph, nodes: Iterable[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Appends the nodes of another graph to this one, and notes the copy of each; what they read is
    among them, or was copied before."""
    for node in nodes:
        if node.op == "placeholder":
            copy = graph.placeholder(node.target)
        else:
            # The facts are shared, not copied: they are immutable, and passes give a node new ones.
            # Only what names nodes has to be translated.
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
            copy = add_call(graph, node.op, node.target, args, kwargs)
        known = facts(node)
        if known.writes:
            known = replace(known, writes=tuple(copies[written] for written in known.writes))
        set_facts(copy, known)
        copies[node] = copy
