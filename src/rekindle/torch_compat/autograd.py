"""The autograd graph: which of its nodes an op belongs to, and how its backward was asked for."""

from typing import Any

import torch


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
