"""What a library does to a model once, at its first call: done while the call is read, undone after
it, since planning leaves a model as it was, and done again when a call is compared with a plan."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class Prepared:
    """The calls that prepared a model while it was read; each does nothing the second time."""

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[[nn.Module], Any], weakref.ref[nn.Module]]] = []

    def prepare(self, function: Callable[[nn.Module], Any], model: nn.Module) -> None:
        self._calls.append((function, weakref.ref(model)))
        function(model)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def again(self) -> None:
        for function, reference in self._calls:
            model = reference()
            if model is not None:
                function(model)


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Attributes and hooks of the modules afterwards are those of before."""
    saved = []
    for module in model.modules():
        attributes = dict(vars(module))
        tables = [(v, v.copy()) for k, v in attributes.items() if k.endswith("_hooks")]
        saved.append((module, attributes, tables))
    try:
        yield
    finally:
        for module, attributes, tables in saved:
            vars(module).clear()
            vars(module).update(attributes)
            for table, before in tables:
                table.clear()
                table.update(before)
