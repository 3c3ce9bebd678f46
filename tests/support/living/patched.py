"""Classes, functions and libraries that are patched between steps (finding E4)."""

import math
import sys
import types
from typing import Any

import torch
from support.living.cases import Living, case
from torch import Tensor, nn


class Gate(nn.Module):
    """A submodule whose class changes."""

    floor = 0.5

    def forward(self, h: Tensor) -> Tensor:
        return self.shape_it(h) + self.level + self.floor

    def shape_it(self, h: Tensor) -> Tensor:
        return torch.sin(h)

    @property
    def level(self) -> float:
        return 1.0

    @staticmethod
    def fixed(h: Tensor) -> Tensor:
        return h * 2


ORIGINAL = {name: vars(Gate)[name] for name in ("floor", "shape_it", "level", "fixed", "forward")}


class Gated(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def middle(self, h: Tensor) -> Tensor:
        return self.gate.fixed(self.gate(h))

    def leave(self) -> None:
        for name, value in ORIGINAL.items():
            setattr(Gate, name, value)


@case("e4")
class MethodOfAClassPatched(Gated):
    def change(self) -> None:
        Gate.shape_it = lambda self, h: torch.relu(h) * 3


@case("e4")
class PropertyOfAClassPatched(Gated):
    def change(self) -> None:
        Gate.level = property(lambda self: -2.0)


@case("e4")
class StaticMethodPatched(Gated):
    def change(self) -> None:
        Gate.fixed = staticmethod(lambda h: h * 5)


@case("e4")
class AttributeOfAClassSet(Gated):
    def change(self) -> None:
        Gate.floor = -0.5


@case("e4")
class CallOfAClassPatched(Gated):
    """As tools for profiling and quantization do."""

    def change(self) -> None:
        Gate.__call__ = lambda self, h: nn.Module.__call__(self, h) * 3

    def leave(self) -> None:
        if "__call__" in vars(Gate):
            del Gate.__call__


@case("e4")
class GetattrOfAClassPatched(Living):
    """An attribute that only `__getattr__` of the class finds."""

    def __getattr__(self, name: str) -> Any:
        if name == "invented":
            return Scales.level
        return super().__getattr__(name)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.invented

    def change(self) -> None:
        Scales.level = 3.0

    def leave(self) -> None:
        Scales.level = 2.0


class Scales:
    level = 2.0


class Loud(Gate):
    """A class of its own whose attribute comes from a base."""


@case("e4")
class AttributeShadowedByASubclass(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Loud()

    def change(self) -> None:
        Loud.floor = -1.5

    def leave(self) -> None:
        if "floor" in vars(Loud):
            del Loud.floor


@case("e4")
class MethodShadowedByASubclass(AttributeShadowedByASubclass):
    def change(self) -> None:
        Loud.shape_it = lambda self, h: h * 7

    def leave(self) -> None:
        if "shape_it" in vars(Loud):
            del Loud.shape_it


@case("e4")
class LinearPatchedEverywhere(Living):
    original = nn.Linear.forward

    def change(self) -> None:
        nn.Linear.forward = lambda self, x: nn.functional.linear(x, self.weight * 0.5, self.bias)

    def leave(self) -> None:
        nn.Linear.forward = LinearPatchedEverywhere.original


@case("e4")
class OwnClassPatched(Living):
    """The class of the managed model itself."""

    def middle(self, h: Tensor) -> Tensor:
        return h * 2

    def change(self) -> None:
        OwnClassPatched.middle = lambda self, h: h * 3

    def leave(self) -> None:
        OwnClassPatched.middle = MIDDLE


MIDDLE = OwnClassPatched.middle


@case("e4")
class OwnForwardOfTheClassPatched(Living):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def change(self) -> None:
        OwnForwardOfTheClassPatched.forward = lambda self, x: self.second(torch.relu(self.first(x)))

    def leave(self) -> None:
        OwnForwardOfTheClassPatched.forward = FORWARD


FORWARD = OwnForwardOfTheClassPatched.forward


def plain(h: Tensor, *, scale: float = 2.0) -> Tensor:
    return h * scale


def other(h: Tensor, *, scale: float = 2.0) -> Tensor:
    return h * scale + 1


PLAIN_CODE = plain.__code__


@case("e4")
class CodeOfAFunctionReplaced(Living):
    """As hot reloading does."""

    def middle(self, h: Tensor) -> Tensor:
        return plain(h)

    def change(self) -> None:
        plain.__code__ = other.__code__

    def leave(self) -> None:
        plain.__code__ = PLAIN_CODE


@case("e4")
class KeywordDefaultReplaced(CodeOfAFunctionReplaced):
    def change(self) -> None:
        plain.__kwdefaults__["scale"] = 3.0

    def leave(self) -> None:
        plain.__kwdefaults__["scale"] = 2.0


@case("e4")
class AttributeOfAFunction(CodeOfAFunctionReplaced):
    def middle(self, h: Tensor) -> Tensor:
        return h * plain.scale

    def __init__(self) -> None:
        super().__init__()
        plain.scale = 2.0

    def change(self) -> None:
        plain.scale = 3.0

    def leave(self) -> None:
        del plain.scale


SETTINGS = types.ModuleType("settings")
SETTINGS.scale = 2.0


@case("e4")
class AttributeOfAModuleObject(Living):
    """`import settings; settings.scale`."""

    def middle(self, h: Tensor) -> Tensor:
        return h * SETTINGS.scale

    def change(self) -> None:
        SETTINGS.scale = 3.0

    def leave(self) -> None:
        SETTINGS.scale = 2.0


@case("e4")
class ImportInForward(Living):
    def middle(self, h: Tensor) -> Tensor:
        import tests_living_settings as settings

        return h * settings.scale

    def __init__(self) -> None:
        super().__init__()
        sys.modules["tests_living_settings"] = SETTINGS

    def change(self) -> None:
        new = types.ModuleType("tests_living_settings")
        new.scale = 3.0
        sys.modules["tests_living_settings"] = new

    def leave(self) -> None:
        sys.modules.pop("tests_living_settings", None)


@case("e4")
class ConstantOfALibrary(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * math.e

    original = math.e

    def change(self) -> None:
        math.e = 3.0

    def leave(self) -> None:
        math.e = self.original
