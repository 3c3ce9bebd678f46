"""Nested arguments and outputs <-> flat lists of leaves.

What torch's pytree knows (lists, tuples, dicts, registered classes) is split fast. Any other
object that holds tensors, such as a dataclass or a cache, is walked, and rebuilt by a deep copy in
which each tensor is replaced.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.torch_compat import pytree

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Structure:
    """How to rebuild one nest from its tensors. `leaves` holds, per pytree leaf, the index of its
    tensor, or an opaque object together with the indices of the tensors inside it."""

    spec: Any
    leaves: tuple["_Leaf", ...]
    num_tensors: int

    @property
    def key(self) -> Any:
        """What a model could see of the nest, the tensors aside."""
        return self.spec, tuple([leaf.key or leaf.index for leaf in self.leaves])

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        """The nest again, with these tensors in their places."""
        flat = [leaf.rebuild(tensors) for leaf in self.leaves]
        return pytree.tree_unflatten(flat, self.spec)


@dataclass(frozen=True, slots=True)
class _Leaf:
    value: Any  # a non-tensor, or an object that holds tensors
    index: int = -1  # of the tensor, where the leaf is one
    inside: tuple[tuple[Any, int], ...] = ()  # tensors inside `value` and their indices
    key: Any = None  # what a model could see of a non-tensor

    def rebuild(self, tensors: Sequence[Any]) -> Any:
        if self.index >= 0:
            return tensors[self.index]
        if not self.inside:
            return self.value
        memo = {id(old): tensors[index] for old, index in self.inside}
        return copy.deepcopy(self.value, memo)


def split(nest: Any) -> tuple[list[torch.Tensor], Structure]:
    """The distinct tensors of a nest in order of appearance, and how to rebuild it."""
    flat, spec = pytree.tree_flatten(nest)
    tensors: list[torch.Tensor] = []
    index_of: dict[int, int] = {}

    def add(tensor: torch.Tensor) -> int:
        if id(tensor) not in index_of:
            index_of[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return index_of[id(tensor)]

    leaves = []
    for leaf in flat:
        if isinstance(leaf, torch.Tensor):
            leaves.append(_Leaf(None, add(leaf)))
        elif isinstance(leaf, _PLAIN):
            leaves.append(_Leaf(leaf, key=describe(leaf, index_of)))
        else:
            found: list[torch.Tensor] = []
            _walk(leaf, found.append, set())
            inside = tuple((t, add(t)) for t in found)
            leaves.append(_Leaf(leaf, inside=inside, key=describe(leaf, index_of)))
    return tensors, Structure(spec, tuple(leaves), len(tensors))


class Same:
    """An object that is equal to itself alone; keeps it alive, so that its id stays its own."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.obj is self.obj

    def __hash__(self) -> int:
        return id(self.obj)


def describe(obj: Any, tensors: dict[int, int], seen: frozenset[int] = frozenset()) -> Any:
    """A hashable account of an object: equal for two objects that a model cannot tell apart,
    tensors aside, which stand as their indices."""
    if isinstance(obj, torch.Tensor):
        return ("tensor", tensors.get(id(obj), -1))
    if isinstance(obj, float):
        return (float, repr(obj))  # tells -0.0 from 0.0, and nan from itself not
    if isinstance(obj, _PLAIN):
        return (type(obj), obj)
    if id(obj) in seen:
        return "above"
    seen = seen | {id(obj)}
    if isinstance(obj, dict):
        items = [(describe(k, tensors, seen), describe(v, tensors, seen)) for k, v in obj.items()]
        return (type(obj), tuple(items))
    if isinstance(obj, (list, tuple)):
        return (type(obj), tuple([describe(v, tensors, seen) for v in obj]))
    fields = getattr(obj, "__dict__", None)
    if fields is None or isinstance(obj, (type, torch.nn.Module)) or callable(obj):
        return (type(obj), Same(obj))
    return (type(obj), describe(fields, tensors, seen))


def _walk(obj: Any, found: Callable[[torch.Tensor], Any], seen: set[int]) -> None:
    if isinstance(obj, torch.Tensor):
        if id(obj) not in seen:
            seen.add(id(obj))
            found(obj)
        return
    if isinstance(obj, (*_PLAIN, type, torch.nn.Module)) or id(obj) in seen:
        return
    seen.add(id(obj))
    if isinstance(obj, dict):
        children: Any = obj.values()
    elif isinstance(obj, (list, tuple, set, frozenset)):
        children = obj
    else:
        children = list(getattr(obj, "__dict__", {}).values())
        slots = [s for cls in type(obj).__mro__ for s in getattr(cls, "__slots__", ())]
        children += [getattr(obj, s) for s in slots if hasattr(obj, s)]
    for child in children:
        _walk(child, found, seen)


def path_names(nest: Any, root: str) -> list[str]:
    """A readable name per distinct tensor of the nest, in the order of `split`."""
    names: list[str] = []
    seen: set[int] = set()
    for path, leaf in pytree.tree_flatten_with_path(nest)[0]:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
            seen.add(id(leaf))
            names.append(root + pytree.keystr(path))
        elif not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            found: list[torch.Tensor] = []
            _walk(leaf, found.append, set())
            for tensor in found:
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    names.append(f"{root}{pytree.keystr(path)}.{len(names)}")
    return names


def named_tensors(nest: Any, root: str) -> dict[str, torch.Tensor]:
    """The distinct tensors of a nest by readable names."""
    return dict(zip(path_names(nest, root), split(nest)[0], strict=True))
