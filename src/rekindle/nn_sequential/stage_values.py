"""What flows between the stages of an `nn.Sequential`: a tensor, or tuples and lists of them."""

from collections.abc import Callable
from typing import Any

import torch


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a value that flows between stages: one, or tuples and lists of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The same tuples and lists, with the function applied to each tensor in them."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def detached(value: Any, like: Any = None) -> Any:
    """Leaves that share the storage and need gradients where the tensors of `like` do."""
    wanted = iter(tensors_of(value if like is None else like))
    return map_tensors(lambda t: t.detach().requires_grad_(next(wanted).requires_grad), value)
