"""The arguments of one op: tensors, numbers, and lists of them.

Every op that is recorded goes through here several times. torch's pytree knows any container, and
takes a description of each nest apart and together again; the arguments that the dispatcher hands
on are plain.
"""

from collections.abc import Callable
from typing import Any

import torch

from rekindle.torch_compat import FakeTensor, is_symbolic, pytree

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
        *(torch.SymInt, torch.SymFloat),  # sizes that change
    }
)


def map_tensors(function: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """The nest with `function` applied to each tensor."""
    kind = type(nest)
    if kind is FakeTensor:
        return function(nest)
    if kind in _PLAIN:
        return nest
    if kind is tuple:
        return tuple([map_tensors(function, item) for item in nest])
    if kind is list:
        return [map_tensors(function, item) for item in nest]
    if kind is dict:
        return {key: map_tensors(function, item) for key, item in nest.items()}
    return pytree.tree_map_only(torch.Tensor, function, nest)


def map_numbers(function: Callable[[Any], Any], nest: Any) -> Any:
    """The nest with `function` applied to each number that hangs on sizes which change."""
    if is_symbolic(nest):
        return function(nest)
    kind = type(nest)
    if kind is tuple or kind is torch.Size:
        return tuple([map_numbers(function, item) for item in nest])
    if kind is list or isinstance(nest, list):  # fx has lists of its own
        return [map_numbers(function, item) for item in nest]
    if isinstance(nest, dict):
        return {key: map_numbers(function, item) for key, item in nest.items()}
    return nest


def tensors_of(nest: Any) -> list[torch.Tensor]:
    """The tensors of the nest, in order."""
    found: list[torch.Tensor] = []
    _collect(nest, found)
    return found


def _collect(nest: Any, found: list[torch.Tensor]) -> None:
    kind = type(nest)
    if kind is FakeTensor:
        found.append(nest)
    elif kind in _PLAIN:
        return
    elif kind is tuple or kind is list:
        for item in nest:
            _collect(item, found)
    elif kind is dict:
        for item in nest.values():
            _collect(item, found)
    else:
        found += [t for t in pytree.tree_leaves(nest) if isinstance(t, torch.Tensor)]
