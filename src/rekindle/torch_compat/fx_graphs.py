"""Calls in fx graphs, added in the least time: each op that is planned becomes several of them."""

from collections.abc import Mapping
from typing import Any

from torch import fx

_bases: dict[Any, str] = {}  # what is called -> the name that its nodes are numbered under


def _update(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    node.args, node.kwargs = args, kwargs


# Both at once, where this release has it: two thirds of the time of the two assignments.
_set_arguments: Any = getattr(fx.Node, "_update_args_kwargs", _update)


def add_call(
    graph: fx.Graph, op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.Node:
    """A call at the end of a graph, as `graph.create_node` adds it.

    Its arguments are set afterwards: in those that it is made with torch 2.13 looks for symbols,
    which takes as long as the rest. Its name is given, though it is the same that fx would find:
    fx looks at every letter of it each time.
    """
    base = _bases.get(target)
    if base is None:
        base = _bases[target] = graph._target_to_str(target)
    node = graph.create_node(op, target, name=base)
    _set_arguments(node, args, kwargs)
    return node
