"""Whether two modules are built alike: whatever code reads of the one, read of the other, is the
same value, or the tensor, module or container that stands in its place."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_MOST = 20_000  # things in one module: it takes longer to compare more of them than to read it
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_DICTS = (dict, OrderedDict)


@dataclass(frozen=True, slots=True)
class Alike:
    """How one module stands for another."""

    tensors: dict[int, torch.Tensor]  # by the id of the first module's tensor
    differing: frozenset[str]  # attributes that are plain and not equal
    parts: frozenset[int]  # ids of all that can change, of both


class _Different(Exception):
    pass


def alike(first: nn.Module, other: nn.Module) -> Alike | str:
    """What stands for what; or the name of a part in which they are not built alike, or which both
    have in common: a tensor, a module, a table."""
    walk = _Walk()
    try:
        walk.pair(first, other, "")
        while walk.open:
            first, other, walk.path = walk.open.pop()
            walk.inside(first, other)
    except _Different as error:
        return f"{walk.path}{error}".lstrip(".") or "itself"
    return Alike(walk.tensors, frozenset(walk.differing), frozenset(walk.there) | walk.back.keys())


def _is_plain(values: tuple[Any, ...]) -> bool:
    kinds = (*_PLAIN, *_OF_TORCH)
    return all(_is_plain(v) if type(v) is tuple else type(v) in kinds for v in values)


def _step(name: Any) -> str:
    inner = name in ("", "_modules", "_parameters", "_buffers")
    return "" if inner or name is None else f".{name}"


@dataclass(slots=True)
class _Walk:
    open: list[tuple[Any, Any, str]] = field(default_factory=list)
    path: str = ""  # of what is looked into
    there: dict[int, int] = field(default_factory=dict)  # what stands for what, by id
    back: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    differing: set[str] = field(default_factory=set)

    def pair(self, a: Any, b: Any, name: Any) -> None:
        """Compares two values, which hang on what is looked into by this name."""
        kind = type(a)
        if kind is not type(b):
            if kind in _PLAIN and type(b) in _PLAIN and isinstance(name, str) and name:
                self.differing.add(name)
                return
            raise _Different(_step(name))
        if kind in _PLAIN or kind in _OF_TORCH:
            if a is not b and repr(a) != repr(b):  # -0.0 is not 0.0, and nan is nan
                if not isinstance(name, str) or not name or kind in _OF_TORCH:
                    raise _Different(_step(name))
                self.differing.add(name)
            return
        if not self._can_change(a):
            if a is not b:
                raise _Different(_step(name))
            return
        if kind is tuple and _is_plain(a):
            if repr(a) != repr(b):
                raise _Different(_step(name))
            return
        if a is b:
            # The same part of both: what is done to it through the one, the other sees.
            raise _Different(_step(name))
        if id(a) in self.there or id(b) in self.back:
            if self.there.get(id(a)) != id(b) or self.back.get(id(b)) != id(a):
                raise _Different(_step(name))
            return
        self.there[id(a)], self.back[id(b)] = id(b), id(a)
        if len(self.there) > _MOST:
            raise _Different(_step(name))
        self.open.append((a, b, self.path + _step(name)))

    @staticmethod
    def _can_change(a: Any) -> bool:
        """Whether it is compared by what is in it, and not by its identity."""
        kind = type(a)
        containers = kind in _DICTS or kind in (list, tuple, set)
        return containers or isinstance(a, (torch.Tensor, nn.Module))

    def inside(self, a: Any, b: Any) -> None:
        if isinstance(a, torch.Tensor):
            self._tensor(a, b)
        elif isinstance(a, nn.Module):
            if isinstance(a, (torch.jit.ScriptModule, nn.modules.lazy.LazyModuleMixin)):
                raise _Different()
            self.pair(vars(a), vars(b), "")
        elif type(a) in _DICTS:
            # An order of its own, which changes without a pointer being another.
            if len(a) != len(b) or (a and type(a) is OrderedDict):
                raise _Different()
            for (k, v), (other, w) in zip(a.items(), b.items(), strict=True):
                if type(k) is not type(other) or (k is not other and k != other):
                    raise _Different()
                if type(k) not in (str, int):
                    raise _Different()
                self.pair(v, w, k)
        elif type(a) is set:
            if a != b or not all(type(v) in (str, int) for v in a):
                raise _Different()
        else:
            if len(a) != len(b):
                raise _Different()
            for v, w in zip(a, b, strict=True):
                self.pair(v, w, None)

    def _tensor(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if type(a) not in _TENSORS or described(a) != described(b):
            raise _Different()
        self.tensors[id(a)] = b
        if vars(a) or vars(b):
            self.pair(vars(a), vars(b), "")


def described(t: torch.Tensor) -> tuple[Any, ...]:
    """All that code can read of a tensor besides its data."""
    if t.layout is not torch.strided:
        return (t.layout, id(t))
    return (
        *(type(t), t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad),
        *(t.is_leaf, t.is_conj(), t.is_neg(), t.is_inference(), t._is_view(), t.is_meta),
    )
