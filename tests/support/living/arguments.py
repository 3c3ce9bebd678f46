"""Arguments that are no tensors: objects, numbers, strings, containers (finding E10)."""

import collections
import dataclasses
import types
from typing import Any

import torch
from support.living.cases import Living, case, data
from torch import Tensor


@dataclasses.dataclass
class Config:
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Flags:
    scale: float
    name: str = "plain"


class ReadsAFlag(Living):
    def forward(self, x: Tensor, flags: Any) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * flags.scale)


@case("e10", quick=True)
class SlotsDataclassArgument(ReadsAFlag):
    def before(self, step: int) -> None:
        self.flags = Flags(2.0 if step < 2 else 3.0)

    def inputs(self, step: int) -> Any:
        return (data(step), Flags(2.0 if step < 2 else 3.0)), {}


@case("e10")
class DataclassArgument(ReadsAFlag):
    def inputs(self, step: int) -> Any:
        return (data(step),), {"flags": Config(2.0 if step < 2 else 3.0)}


@case("e10")
class NamespaceArgument(ReadsAFlag):
    def inputs(self, step: int) -> Any:
        return (data(step), types.SimpleNamespace(scale=2.0 if step < 2 else 3.0)), {}


class Pair(collections.namedtuple("Pair", "x scale")):
    __slots__ = ()


@case("e10")
class NamedTupleArgument(Living):
    def forward(self, pair: Pair) -> Tensor:
        return self.second(torch.tanh(self.first(pair.x)) * pair.scale)

    def inputs(self, step: int) -> Any:
        return (Pair(data(step), 2.0 if step < 2 else 3.0),), {}


@case("e10")
class DictArgument(Living):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        h = torch.tanh(self.first(batch["x"]))
        return self.second(h + batch["shift"]) if "shift" in batch else self.second(h)

    def inputs(self, step: int) -> Any:
        more = {} if step < 2 else {"shift": data(step + 50, 64, 12)}
        return ({"x": data(step), **more},), {}


@case("e10")
class StringAndNumberArguments(Living):
    def forward(
        self, x: Tensor, how: str = "tanh", power: int = 1, *, scale: float = 1.0
    ) -> Tensor:
        h = torch.tanh(self.first(x)) if how == "tanh" else torch.relu(self.first(x))
        return self.second(h**power * scale)

    def inputs(self, step: int) -> Any:
        changes = [((), {}), ((), {}), (("tanh", 2), {"scale": 0.5}), (("relu",), {"scale": 0.5})]
        more, kwargs = changes[step]
        return (data(step), *more), kwargs
