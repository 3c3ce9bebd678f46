"""Which calls a plan covers: everything it assumed, as one value to compare.

A call's signature holds the structure of the arguments, each tensor's layout, dtype, device and
whether it requires grad, every other argument's value, the grad mode and autocast. A module's
holds its submodules, their training flags, and the same of each parameter and buffer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rekindle.capture.structure import Structure
from rekindle.torch_compat import autocast_state


def call_signature(tensors: Sequence[torch.Tensor], structure: Structure) -> tuple[Any, ...]:
    grad = torch.is_grad_enabled()
    return (
        grad,
        torch.is_inference_mode_enabled(),
        autocast_state(),
        structure.spec,
        tuple([leaf.key or leaf.index for leaf in structure.leaves]),
        tuple([_tensor_key(t, grad) for t in tensors]),
    )


def _tensor_key(t: torch.Tensor, grad: bool) -> tuple[Any, ...]:
    return (type(t), t.shape, t.stride(), t.dtype, t.device, grad and t.requires_grad)


class ModuleView:
    """Fast access to a module's parameters and buffers, and a check that it is as planned."""

    def __init__(self, model: nn.Module, parameters: Sequence[str], buffers: Sequence[str]) -> None:
        self.modules = [(m._modules, tuple(m._modules.values()), m) for m in model.modules()]
        self.places = [_place(model, name, "_parameters") for name in parameters]
        self.places += [_place(model, name, "_buffers") for name in buffers]
        self.expected = self.tensors_key(self.tensors())
        self.training = tuple([m.training for _, _, m in self.modules])

    def tensors(self) -> list[torch.Tensor]:
        return [d[name] for d, name in self.places]

    @staticmethod
    def tensors_key(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        return tuple([(t.requires_grad, t.dtype, t.device, t.shape, t.stride()) for t in tensors])

    def miss(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """None where the module is as planned, else what is not."""
        for children, old, _ in self.modules:
            if tuple(children.values()) != old:
                return "submodules were replaced"
        if tuple([m.training for _, _, m in self.modules]) != self.training:
            return "training flags differ (model.train() / model.eval())"
        key = self.tensors_key(tensors)
        if key != self.expected:
            what = ("requires_grad", "dtype", "device", "shape", "strides")
            for (_, name), now, then in zip(self.places, key, self.expected, strict=True):
                if now != then:
                    word = next(w for w, a, b in zip(what, now, then, strict=True) if a != b)
                    return f"{word} of {name} changed"
        return None


def _place(model: nn.Module, name: str, kind: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), kind), last
