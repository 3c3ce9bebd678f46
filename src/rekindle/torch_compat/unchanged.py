"""Whether modules hold what they held, tensors laid out as they were, told in microseconds."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rekindle import _native


class Unchanged:
    """What modules hold now."""

    __slots__ = ("_layouts", "_leaves", "_watch")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._watch = _native.Watch(tuple(modules), nn.Module, torch.Tensor)
        # Held here, where the collector sees a circle that goes through it.
        self._leaves = self._watch.take_leaves()
        found: list[Any] | None = self._watch.tensors(tuple(modules))
        assert found is not None
        self._layouts = torch._C._dynamo.guards.TensorGuards(
            *found,
            dynamic_dims_sizes=[list(t.shape) for t in found],
            dynamic_dims_strides=[list(t.stride()) for t in found],
        )

    def tensors(self, modules: Sequence[nn.Module]) -> list[torch.Tensor] | None:
        """The tensors in the modules, in a fixed order; None where anything is different."""
        found: list[Any] | None = self._watch.tensors(tuple(modules))
        if found is None or not self._layouts.check(*found):
            return None
        return found
