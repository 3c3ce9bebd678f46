"""Attributes that a forward reads and that change between steps (finding E4)."""

import dataclasses
import enum
import functools
import types
from typing import Any

import numpy
import torch
from support.living.cases import Living, case
from torch import Tensor, nn


@case("e4", quick=True)
class PrivateAttribute(Living):
    def __init__(self) -> None:
        super().__init__()
        self._scale = 2.0

    def middle(self, h: Tensor) -> Tensor:
        return h * self._scale

    def change(self) -> None:
        self._scale = 3.0


@case("e4")
class ListChangedInPlace(Living):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0, 2.0]

    def middle(self, h: Tensor) -> Tensor:
        for scale in self.scales:
            h = h * scale
        return h

    def change(self) -> None:
        self.scales[1] = 0.5


@case("e4")
class ListGrows(ListChangedInPlace):
    def change(self) -> None:
        self.scales.append(0.5)


class LoraLayer(nn.Module):
    """As in PEFT: the scaling of each adapter in a dictionary."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.up = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": 2.0}
        self._disable_adapters = False
        self._active = ["default"]

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if self._disable_adapters:
            return out
        for name in self._active:
            if name in self.up:
                out = out + self.up[name](self.down[name](x)) * self.scaling[name]
        return out


class WithLora(Living):
    def __init__(self) -> None:
        super().__init__()
        self.first = LoraLayer(self.first)


@case("e4", quick=True)
class DictOfScaling(WithLora):
    def change(self) -> None:
        self.first.scaling["default"] = 0.25


@case("e4")
class AdaptersDisabled(WithLora):
    def change(self) -> None:
        self.first._disable_adapters = True


@case("e4")
class AnotherAdapter(WithLora):
    def change(self) -> None:
        torch.manual_seed(3)
        base = self.first.base
        self.first.down["new"] = nn.Linear(base.in_features, 2, bias=False)
        self.first.up["new"] = nn.Linear(2, base.out_features, bias=False)
        self.first.scaling["new"] = 0.5
        self.first._active = ["new"]


class Mode(enum.Enum):
    TANH = "tanh"
    RELU = "relu"


@case("e4")
class EnumAttribute(Living):
    def __init__(self) -> None:
        super().__init__()
        self.mode = Mode.TANH

    def middle(self, h: Tensor) -> Tensor:
        return torch.tanh(h) if self.mode is Mode.TANH else torch.relu(h)

    def change(self) -> None:
        self.mode = Mode.RELU


@case("e4", quick=True)
class FunctionAttribute(Living):
    def __init__(self) -> None:
        super().__init__()
        self.activation: Any = torch.tanh

    def middle(self, h: Tensor) -> Tensor:
        return self.activation(h)

    def change(self) -> None:
        self.activation = nn.functional.softplus


@case("e4")
class LambdaAttribute(FunctionAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.activation = lambda h: h * 2

    def change(self) -> None:
        self.activation = lambda h: h * 3


@case("e4")
class PartialAttribute(FunctionAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.activation = functools.partial(nn.functional.leaky_relu, negative_slope=0.1)

    def change(self) -> None:
        self.activation = functools.partial(nn.functional.leaky_relu, negative_slope=0.9)


@case("e4", quick=True)
class PlainTensorAttribute(Living):
    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.ones(12)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.offset

    def change(self) -> None:
        self.offset = torch.linspace(-1, 1, 12)


@case("e4")
class PlainTensorWritten(PlainTensorAttribute):
    def change(self) -> None:
        self.offset.mul_(3)


@case("e4")
class PlainTensorOfAnotherShape(PlainTensorAttribute):
    def change(self) -> None:
        self.offset = torch.linspace(-1, 1, 1)


@case("e4")
class PlainTensorInAList(Living):
    def __init__(self) -> None:
        super().__init__()
        self.offsets = [torch.ones(12), torch.zeros(12)]

    def middle(self, h: Tensor) -> Tensor:
        return h + self.offsets[0] - self.offsets[1]

    def change(self) -> None:
        self.offsets[1] = torch.linspace(-1, 1, 12)


@case("e4", breaks=True)
class PlainTensorThatTrains(Living):
    """A leaf that is no parameter, replaced by another one that the optimizer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"w": torch.ones(12, requires_grad=True)}

    def middle(self, h: Tensor) -> Tensor:
        return h * self.table["w"]

    def change(self) -> None:
        self.table["w"] = torch.full((12,), 0.5, requires_grad=True)

    def observed(self) -> Any:
        return self.table["w"].grad


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    act: str = "tanh"
    sizes: dict[str, int] = dataclasses.field(default_factory=lambda: {"power": 2})


@case("e4", quick=True)
class ConfigObject(Living):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def middle(self, h: Tensor) -> Tensor:
        h = torch.tanh(h) if self.config.act == "tanh" else torch.relu(h)
        return h * self.config.scale + h ** self.config.sizes["power"]

    def change(self) -> None:
        self.config.scale = 0.5


@case("e4")
class ConfigObjectReplaced(ConfigObject):
    def change(self) -> None:
        self.config = Config(act="relu")


@case("e4")
class ConfigDeepInside(ConfigObject):
    def change(self) -> None:
        self.config.sizes["power"] = 3


@case("e4")
class NestedNamespace(Living):
    def __init__(self) -> None:
        super().__init__()
        self.options = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0))

    def middle(self, h: Tensor) -> Tensor:
        return h * self.options.inner.scale

    def change(self) -> None:
        self.options.inner.scale = 3.0


@case("e4")
class SetOfNames(Living):
    def __init__(self) -> None:
        super().__init__()
        self.skipped = {"square"}

    def middle(self, h: Tensor) -> Tensor:
        return h if "square" in self.skipped else h * h

    def change(self) -> None:
        self.skipped.clear()


@case("e4")
class NoneBecomesANumber(Living):
    def __init__(self) -> None:
        super().__init__()
        self.limit: float | None = None

    def middle(self, h: Tensor) -> Tensor:
        return h if self.limit is None else h.clamp(-self.limit, self.limit)

    def change(self) -> None:
        self.limit = 0.25


@case("e4")
class AttributeAppears(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * self.extra if hasattr(self, "extra") else h

    def change(self) -> None:
        self.extra = 2.0


@case("e4")
class OrderOfLayers(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.order = (0, 1, 2)

    def middle(self, h: Tensor) -> Tensor:
        for i in self.order:
            h = torch.tanh(self.layers[i](h))
        return h

    def change(self) -> None:
        self.order = (2, 0)


@case("e4", breaks=True)
class NumpyArrayAttribute(Living):
    def __init__(self) -> None:
        super().__init__()
        self.weights = numpy.array([1.0, 2.0], dtype=numpy.float32)

    def middle(self, h: Tensor) -> Tensor:
        return h * float(self.weights[0]) + torch.from_numpy(self.weights).sum()

    def change(self) -> None:
        self.weights[0] = 0.5


@case("e4", breaks=True)
class LayersInAPlainList(Living):
    """Modules that are not registered: their parameters are known to nobody but the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(12, 12)]

    def middle(self, h: Tensor) -> Tensor:
        return torch.tanh(self.hidden[0](h))

    def change(self) -> None:
        torch.manual_seed(5)
        self.hidden[0] = nn.Linear(12, 12)

    def observed(self) -> Any:
        return [p.grad for p in self.hidden[0].parameters()]


@case("e4")
class DtypeAttribute(Living):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.float32

    def middle(self, h: Tensor) -> Tensor:
        return h.to(self.inner).exp().to(h.dtype)

    def change(self) -> None:
        self.inner = torch.float64
