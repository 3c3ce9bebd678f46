"""A recorded or rewritten graph as text: one line per node, for `print(joint)`."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import NodeFacts, facts, source_of
from rekindle.torch_compat import is_overload


def graph_text(
    nodes: Sequence[fx.Node],
    outputs: Iterable[fx.Node],
    gradients: Iterable[tuple[fx.Node, fx.Node]],
) -> str:
    """Per node: its name, its tensor's dtype and shape, the call or the source, and the module."""
    rows = [_row(node, facts(node)) for node in nodes]
    widths = [max((len(row[k]) for row in rows), default=0) for k in range(3)]
    lines = [
        "  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])).rstrip()
        for row in rows
    ]
    lines.append(f"outputs: {', '.join(node.name for node in outputs)}")
    pairs = (f"{source_of(leaf).name}: {made.name}" for leaf, made in gradients)
    lines.append(f"gradients: {', '.join(pairs)}")
    return "\n".join(lines)


def _row(node: fx.Node, known: NodeFacts) -> tuple[str, str, str, str]:
    if known.source is not None:
        call = f"{known.source.kind} {known.source.name}"
    else:
        target = node.target
        name = str(target) if is_overload(target) else getattr(target, "__name__", str(target))
        args = [_arg(a) for a in node.args] + [f"{k}={_arg(v)}" for k, v in node.kwargs.items()]
        call = f"{name}({', '.join(args)})"
    place = f"{known.phase}{' of ' + known.module if known.module else ''}" if known.phase else ""
    return node.name, _tensor(known.value), call, place


def _tensor(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, value.shape))}]"
    return "several" if isinstance(value, (tuple, list)) else ""


def _arg(arg: Any) -> str:
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join(map(_arg, arg))}]"
    return str(arg)
