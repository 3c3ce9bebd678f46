"""The autograd graph: which of its nodes an op belongs to, and how its backward was asked for."""

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward


def forward_sequence_nr() -> int:
    """The number of the autograd node that the op being dispatched belongs to."""
    # torch tells the number that the next node will get; the node of the op being dispatched has
    # been made above the mode that asks.
    return int(torch.autograd._get_sequence_nr()) - 1


def backward_node() -> Any | None:
    """The autograd node whose backward is running in this thread, or None."""
    return torch._C._current_autograd_node()


def node_sequence_nr(node: Any) -> int:
    """The number of an autograd node; its forward op has the same."""
    return int(node._sequence_nr())


def backward_keeps_graph() -> bool:
    """Inside a backward: whether the caller asked for retain_graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def outputs_below(roots: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> set[int]:
    """Indices of the outputs that some root was computed from, so that part of their gradient comes
    through it."""
    # Ops with several outputs, such as a split, have one node for all of them.
    place = {(t.grad_fn, t.output_nr): i for i, t in enumerate(outputs) if t.grad_fn is not None}
    stack = [edge for t in roots if t.grad_fn is not None for edge in t.grad_fn.next_functions]
    met: set[Any] = set()
    seen: set[Any] = set()
    while stack:
        node, number = stack.pop()
        met.add((node, number))
        if node is not None and node not in seen:
            seen.add(node)
            stack += node.next_functions
    return {i for edge, i in place.items() if edge in met}


def kept_tensors(roots: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What the nodes of the autograd graph above these tensors have saved for their backward."""
    stack = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        # Nodes in C++ show what they saved as attributes, those of Python's Functions as a tuple.
        names = [name for name in dir(node) if name.startswith("_saved_")]
        for value in (*(getattr(node, n) for n in names), getattr(node, "saved_tensors", ())):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor):
                    yield item
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)


_INPUTS = 3  # the position of `inputs` behind the roots, in every release that is supported


def differentiated_now() -> list[torch.Tensor]:
    """Inside a backward: the tensors that some caller, in whatever thread, asks gradients of by
    `torch.autograd.grad` or `backward(inputs=...)`. The engine itself does not tell: it takes such
    a gradient on its way."""
    found: list[torch.Tensor] = []
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is _engine_run_backward.__code__:
                given = frame.f_locals["args"][_INPUTS:]
                found += [t for t in (given[0] if given else ()) if isinstance(t, torch.Tensor)]
            # At its end no frame is held: one of them is this function's own, and a circle would
            # keep what all of them see, such as the gradients that have arrived.
            frame = frame.f_back
    return found
