"""Whether a capture with symbols is, for given sizes, what a capture of a call of those sizes is.

Ops, arguments, shapes, strides and storages of all nodes are compared. What torch does with symbols
is checked so against what it does with numbers, for the calls that were seen.
"""

from typing import Any

import torch
from torch import fx

from rekindle.capture.changing_sizes import Sizes, SizesAt
from rekindle.capture.joint import JointGraph
from rekindle.capture.node_facts import facts, source_of
from rekindle.torch_compat import is_overload, pytree, storage_bytes


def disagreement(changing: JointGraph, plain: JointGraph, sizes: Sizes) -> str | None:
    """None, or where the first graph differs for these sizes from the second, which has them."""
    assert changing.changing is not None
    mine, theirs = _Side(changing, changing.changing.at(sizes)), _Side(plain, None)
    if mine.inputs != theirs.inputs:
        return "the arguments, parameters or buffers that are read"
    for a, b in zip(mine.calls, theirs.calls, strict=False):
        if a.target != b.target or mine.told(a) != theirs.told(b):
            place = facts(b).where or facts(b).module or "the begin"
            return f"{b.target} at {place}, not {a.target}"
    if len(mine.calls) != len(theirs.calls):
        return f"{len(theirs.calls)} calls, not {len(mine.calls)}"
    return None if mine.results == theirs.results else "the outputs or the gradients"


class _Side:
    """A graph as it can be compared: inputs by name, since they stand in the order in which they
    were first read, and calls by their place."""

    def __init__(self, joint: JointGraph, at: SizesAt | None) -> None:
        self.at = at
        entering = [n for n in joint.nodes if n.op == "placeholder"]
        self.calls = [n for n in joint.nodes if n.op != "placeholder"]
        self.name: dict[fx.Node, Any] = {n: i for i, n in enumerate(self.calls)}
        for node in entering:
            source = source_of(node)
            self.name[node] = (source.kind, source.name)
        self.storages: dict[int, Any] = {}
        for node in sorted(entering, key=lambda n: str(self.name[n])) + self.calls:
            self.storages.setdefault(facts(node).storage, self.name[node])
        self.inputs = {
            self.name[n]: (self.tensor(facts(n).value), self.storages[facts(n).storage])
            for n in entering
        }
        self.results = (
            [self.name[n] for n in joint.outputs],
            sorted([(str(self.name[a]), self.name[b]) for a, b in joint.gradients], key=str),
        )

    def tensor(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        numbers = (
            *(tuple(value.shape), value.stride()),
            *(value.storage_offset(), storage_bytes(value)),
        )
        if self.at is not None:
            numbers = self.at.numbers(numbers)
        shape, stride, *rest = numbers
        # The stride of a dimension of size 1 means nothing; what hangs on it is another op later.
        meant = tuple([s if n != 1 else 0 for n, s in zip(shape, stride, strict=True)])
        return (shape, meant, *rest, value.dtype)

    def argument(self, leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return ("node", self.name[leaf])
        value = leaf if self.at is None else self.at.number(leaf)
        return (type(value), repr(value))

    def told(self, node: fx.Node) -> tuple[Any, ...]:
        known = facts(node)
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        values = known.value if isinstance(known.value, (tuple, list)) else [known.value]
        name = str(node.target) if is_overload(node.target) else ""
        return (
            *(name, spec, known.phase, self.storages[known.storage]),
            [self.argument(leaf) for leaf in leaves],
            [self.tensor(value) for value in values],
            [self.name[n] for n in known.writes],
        )
