"""Fake tensors that a capture left behind: in a model, its closures, its globals."""

import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_OURS = "support.living"


def fake_tensors_in(model: nn.Module) -> list[str]:
    """The paths of all that can be reached from the model and from the modules of the cases. A
    plan, which the managed model holds, is made of fake tensors and is left out."""
    found: list[str] = []
    todo: list[tuple[str, Any]] = [("model", model)]
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS):
            todo += [(f"{name}.{key}", value) for key, value in vars(module).items()]
    seen: set[int] = set()
    while todo:
        path, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (FakeTensor, FunctionalTensor)):
            found.append(path)
        todo += [(f"{path}.{key}", item) for key, item in _items(value)]
    return sorted(found)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        if value.is_leaf:
            yield "grad", value.grad
    elif isinstance(value, dict):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, deque)):
        yield from ((str(i), item) for i, item in enumerate(value))
    elif isinstance(value, types.FunctionType):
        for i, cell in enumerate(value.__closure__ or ()):
            try:
                yield f"cell {i}", cell.cell_contents
            except ValueError:  # a cell that is still empty
                continue
        yield from ((f"default {i}", item) for i, item in enumerate(value.__defaults__ or ()))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, nn.Module) or type(value).__module__.startswith(_OURS):
        for key, item in getattr(value, "__dict__", {}).items():
            if not key.startswith("_rekindle"):
                yield key, item
    elif isinstance(value, type) and value.__module__.startswith(_OURS):
        yield from vars(value).items()
