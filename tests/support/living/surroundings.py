"""What a forward reads around itself: globals, closures, defaults, the class (finding E4)."""

from typing import Any

import torch
from support.living.cases import Living, case, restored
from torch import Tensor

SCALE = 2.0
NUMBERS = [1.0, 2.0]
TABLE: dict[str, Any] = {"act": torch.tanh}


@case("e4", quick=True)
class GlobalNumber(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * SCALE

    def change(self) -> None:
        global SCALE
        SCALE = 3.0

    def leave(self) -> None:
        global SCALE
        SCALE = 2.0


@case("e4")
class ModuleLevelList(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * NUMBERS[0] + NUMBERS[1]

    def change(self) -> None:
        NUMBERS[1] = -2.0

    def leave(self) -> None:
        restored(NUMBERS, [1.0, 2.0])


@case("e4")
class TableOfFunctions(Living):
    def middle(self, h: Tensor) -> Tensor:
        return TABLE["act"](h)

    def change(self) -> None:
        TABLE["act"] = torch.relu

    def leave(self) -> None:
        restored(TABLE, {"act": torch.tanh})


def _scaling() -> tuple[Any, Any]:
    scale = 2.0

    def apply(h: Tensor) -> Tensor:
        return h * scale

    def give(new: float) -> None:
        nonlocal scale
        scale = new

    return apply, give


@case("e4", quick=True)
class ClosureCell(Living):
    def __init__(self) -> None:
        super().__init__()
        self.apply_scale, self.give = _scaling()

    def middle(self, h: Tensor) -> Tensor:
        return self.apply_scale(h)

    def change(self) -> None:
        self.give(3.0)


def scaled(h: Tensor, scale: float = 2.0) -> Tensor:
    return h * scale


@case("e4")
class DefaultArgument(Living):
    def middle(self, h: Tensor) -> Tensor:
        return scaled(h)

    def change(self) -> None:
        scaled.__defaults__ = (3.0,)

    def leave(self) -> None:
        scaled.__defaults__ = (2.0,)


@case("e4")
class ClassAttribute(Living):
    scale = 2.0

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale

    def change(self) -> None:
        ClassAttribute.scale = 3.0

    def leave(self) -> None:
        ClassAttribute.scale = 2.0


@case("e4")
class ClassAttributeShadowed(Living):
    scale = 2.0

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale

    def change(self) -> None:
        self.scale = 3.0


@case("e4")
class PropertyReadsAnother(Living):
    def __init__(self) -> None:
        super().__init__()
        self._level = 1

    @property
    def scale(self) -> float:
        return 2.0 * self._level

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale

    def change(self) -> None:
        self._level = 2
