"""Calls in fx graphs, added in the least time: each op that is planned becomes several of them."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from types import FrameType
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


_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: fx.Node) -> str:
    """The innermost line of the code that a node was read from, as FILE:LINE."""
    lines = _LINE.findall(node.meta.get("stack_trace") or "")
    return ":".join(lines[-1]) if lines else ""


def interpreted_line(frame: FrameType) -> str:
    """The line of the node that fx is about to run, where this is the frame that runs it."""
    if frame.f_code is not fx.Interpreter.run_node.__code__:
        return ""
    node = frame.f_locals.get("n")
    return source_line(node) if isinstance(node, fx.Node) else ""


@contextlib.contextmanager
def told_without_nodes(kind: type[Exception]) -> Iterator[None]:
    """An error of this kind says what it said before fx added the node that it was running."""
    try:
        yield
    except kind as error:
        error.args = (str(error).split("\n\nWhile executing")[0], *error.args[1:])
        raise
