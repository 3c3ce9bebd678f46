"""Which calls a plan covers: everything it assumed, as one value to compare.

A call's signature holds the structure of the arguments, each tensor's layout, dtype, device and
whether it requires grad, every other argument's value, the grad mode and autocast. A module's
holds its submodules, their training flags, the same of each parameter and buffer, and the plain
attributes of each module (a dropout probability, a scale): what forward may have read when it was
captured.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rekindle.capture.autocast import autocast_state
from rekindle.capture.pytrees import Structure


def call_signature(tensors: Sequence[torch.Tensor], structure: Structure) -> tuple[Any, ...]:
    """What decides which plan covers a call: modes, structure, and each tensor's shape, strides and
    dtype."""
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


_TRAINING = operator.attrgetter("training")
_ASPECTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "requires_grad": operator.attrgetter("requires_grad"),
    "dtype": operator.attrgetter("dtype"),
    "device": operator.attrgetter("device"),
    "shape": operator.attrgetter("shape"),
    "strides": torch.Tensor.stride,
}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ModuleView:
    """Fast access to a module's parameters and buffers, and a check that it is as planned: as it is
    now, or as another one was (`pattern`), of which it is a copy."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[str],
        buffers: Sequence[str],
        pattern: "ModuleView | None" = None,
    ) -> None:
        self.modules = list(model.modules())
        self.children = [m._modules for m in self.modules]
        self.tree = list(map(tuple, map(dict.values, self.children)))
        # Hooks of submodules are part of what was captured; the model's own run around each call.
        self.hooks = [
            m.__dict__[kind] for m in self.modules[1:] for kind in _HOOKS if kind in m.__dict__
        ]
        self.places = [_place(model, name, "_parameters") for name in parameters]
        self.places += [_place(model, name, "_buffers") for name in buffers]
        if pattern is None:
            self.expected = self.tensors_key(self.tensors())
            self.training = list(map(_TRAINING, self.modules))
            self.num_hooks = list(map(len, self.hooks))
            self.settings = list(_settings(model))
        else:
            self.expected, self.training = pattern.expected, pattern.training
            self.num_hooks = pattern.num_hooks
            self.settings = [s.of(model) for s in pattern.settings]

    def tensors(self) -> list[torch.Tensor]:
        return [d[name] for d, name in self.places]

    @staticmethod
    def tensors_key(tensors: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
        """Per aspect, that of each tensor."""
        return tuple([list(map(get, tensors)) for get in _ASPECTS.values()])

    def miss(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """None where the module is as planned, else what is not. The GPU waits for this at the
        start of every step: all of it is loops inside the interpreter."""
        if list(map(tuple, map(dict.values, self.children))) != self.tree:
            return "submodules were replaced"
        if list(map(_TRAINING, self.modules)) != self.training:
            return "training flags differ (model.train() / model.eval())"
        if list(map(len, self.hooks)) != self.num_hooks:
            return "hooks of submodules were added or removed"
        key = self.tensors_key(tensors)
        if key != self.expected:
            for aspect, now, then in zip(_ASPECTS, key, self.expected, strict=True):
                for (_, name), a, b in zip(self.places, now, then, strict=True):
                    if a != b:
                        return f"{aspect} of {name} changed"
        return None

    def changed(self, is_unread: Callable[["Settings", str], bool]) -> str | None:
        """None where all that forward may have read of the modules is as it was, else what is not.
        One that changes is asked about once; if forward does not read it, it is forgotten. Behind
        one that has a default in its class nobody can see: there the new value is what is asked
        about, and expected from then on."""
        if all(map(Settings.as_before, self.settings)):
            return None
        for settings in self.settings:
            for name, old, now in settings.differences():
                if name not in settings.read and is_unread(settings, name):
                    if settings.has_default(name):
                        settings.expect(name, now)
                    else:
                        settings.forget(name)
                    continue
                settings.read.add(name)
                return f"{settings.path}{name} changed from {old!r} to {now!r}"
        return None


class Settings:
    """The plain attributes of one module, or of its config."""

    __slots__ = ("_expected", "_get", "_is_config", "_module", "_values", "owner", "read")

    def __init__(
        self, model: nn.Module, module: str, is_config: bool, values: dict[str, Any]
    ) -> None:
        self._module, self._is_config = module, is_config
        found = model.get_submodule(module)
        self.owner: Any = found.__dict__["config"] if is_config else found
        self.read: set[str] = set()  # those of which it is known that forward reads them
        self._set(values)

    def of(self, model: nn.Module) -> "Settings":
        """The same, expected of another model."""
        new = Settings(model, self._module, self._is_config, self._values)
        new.read = self.read
        return new

    @property
    def path(self) -> str:
        return (f"{self._module}." if self._module else "") + ("config." if self._is_config else "")

    def _set(self, values: dict[str, Any]) -> None:
        self._values = values
        names = [*values] if len(values) > 1 else [*values, *values]  # of one name: a tuple too
        self._get = operator.itemgetter(*names) if names else None
        self._expected = tuple([values[name] for name in names])

    def as_before(self) -> bool:
        try:
            return self._get is None or bool(self._get(self.owner.__dict__) == self._expected)
        except KeyError:
            return False

    def differences(self) -> list[tuple[str, Any, Any]]:
        table = self.owner.__dict__
        return [
            (name, value, table.get(name))
            for name, value in self._values.items()
            if name not in table or table[name] != value
        ]

    def has_default(self, name: str) -> bool:
        return hasattr(type(self.owner), name)

    def expect(self, name: str, value: Any) -> None:
        self._set({**self._values, name: value})

    def forget(self, name: str) -> None:
        self._set({k: v for k, v in self._values.items() if k != name})


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)


def _settings(model: nn.Module) -> Iterator[Settings]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        config = module.__dict__.get("config")
        for owner, is_config in ((module, False), (config, True)):
            values = {
                name: value
                for name, value in getattr(owner, "__dict__", {}).items()
                if name[0] != "_" and name != "training" and _is_plain(value)
            }
            if values and id(owner) not in seen:
                seen.add(id(owner))
                yield Settings(model, path, is_config, values)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(_is_plain(v) for v in value)
    return type(value) in _PLAIN


def _place(model: nn.Module, name: str, kind: str) -> tuple[dict[str, Any], str]:
    path, _, last = name.rpartition(".")
    return getattr(model.get_submodule(path), kind), last
