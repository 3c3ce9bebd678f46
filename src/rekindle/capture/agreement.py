"""Whether a capture with symbols is, for given sizes, what a capture of a call of those sizes is.

Ops, arguments, shapes, strides and storages of all nodes are compared. What torch does with symbols
is checked so against what it does with numbers, for the calls that were seen.
"""

from typing import Any

import torch
from torch import fx

from rekindle.capture.changing_sizes import Sizes, SizesAt
from rekindle.capture.joint import JointGraph
from rekindle.capture.node_facts import facts
from rekindle.torch_compat import is_overload, pytree, storage_bytes


def disagreement(changing: JointGraph, plain: JointGraph, sizes: Sizes) -> str | None:
    """None, or where the first graph differs for these sizes from the second, which has them."""
    assert changing.changing is not None
    at = changing.changing.at(sizes)
    if len(changing.nodes) != len(plain.nodes):
        return f"{len(plain.nodes)} calls, where {len(changing.nodes)} are expected"
    mine = {node: i for i, node in enumerate(changing.nodes)}
    theirs = {node: i for i, node in enumerate(plain.nodes)}
    for a, b in zip(changing.nodes, plain.nodes, strict=True):
        if _told(a, mine, at) != _told(b, theirs, None):
            return f"{b.target} at {facts(b).where or facts(b).module or 'the begin'}"
    if [mine[n] for n in changing.outputs] != [theirs[n] for n in plain.outputs]:
        return "the outputs"
    pairs = [
        [(number[a], number[b]) for a, b in graph.gradients]
        for number, graph in ((mine, changing), (theirs, plain))
    ]
    return None if pairs[0] == pairs[1] else "the gradients"


def _told(node: fx.Node, number: dict[fx.Node, int], at: SizesAt | None) -> tuple[Any, ...]:
    known = facts(node)

    def resolved(value: Any) -> Any:
        return value if at is None else at.numbers(value)

    def argument(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return ("node", number[leaf])
        value = resolved(leaf)
        return (type(value), repr(value))

    def tensor(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return resolved(
            (tuple(value.shape), value.stride(), value.storage_offset(), storage_bytes(value))
        ), value.dtype

    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    values = known.value if isinstance(known.value, (tuple, list)) else [known.value]
    name = str(node.target) if is_overload(node.target) else getattr(node.target, "__name__", "")
    source = known.source and (known.source.kind, known.source.index)
    return (
        *(node.op, node.op == "placeholder" or name, source, spec, known.phase, known.storage),
        [argument(leaf) for leaf in leaves],
        [tensor(value) for value in values],
        [number[n] for n in known.writes],
    )
