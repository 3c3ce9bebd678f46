"""Adapters that are rescaled, merged, unwrapped (second wave)."""

import torch
from support.living.cases import Living, case
from torch import Tensor, nn


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))
        self.scaling = {"default": 2.0}
        self.merged = False
        self.drop = nn.Dropout(0.1)

    def forward(self, h: Tensor) -> Tensor:
        out = self.base(h)
        if self.merged:
            return out
        return out + self.drop(h) @ self.a.t() @ self.b.t() * self.scaling["default"]

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += self.b @ self.a * self.scaling["default"]
        self.merged = True


class LowRanks(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LowRank(nn.Linear(12, 12)) for _ in range(2))

    def middle(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


@case("mix")
class AdaptersRescaledOne(LowRanks):
    """Two blocks of one class, of which one changes."""

    def change(self) -> None:
        self.layers[1].scaling["default"] = 0.5
        self.layers[0].drop.p = 0.4


@case("mix")
class AdaptersMerged(LowRanks):
    def change(self) -> None:
        for layer in self.layers:
            layer.merge()


@case("mix")
class AdaptersUnwrapped(LowRanks):
    def change(self) -> None:
        for i, layer in enumerate(self.layers):
            layer.merge()
            self.layers[i] = layer.base.requires_grad_(True)


@case("mix")
class BaseInBfloat16(LowRanks):
    def middle(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            kind = layer.base.weight.dtype
            h = torch.tanh(layer.base(h.to(kind)).float() + h @ layer.a.t() @ layer.b.t())
        return h

    def change(self) -> None:
        self.layers[0].base.to(torch.bfloat16)
