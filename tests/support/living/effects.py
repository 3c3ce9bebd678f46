"""What a forward leaves on objects: lists, counters, caches, iterators (findings E2, E3, E6)."""

import collections
import itertools
import types
from typing import Any

import torch
from support.living.cases import Living, case, restored
from torch import Tensor, nn


class Auxiliary(Living):
    """Losses gathered on the way; the caller adds them."""

    def losses(self) -> list[Tensor]:
        return list(self.aux)  # type: ignore[arg-type]

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean() + sum(self.losses())

    def observed(self) -> Any:
        return [t.detach() for t in self.losses()] if hasattr(self, "aux") else ()


@case("e2", quick=True)
class ListOfLosses(Auxiliary):
    def forward(self, x: Tensor) -> Tensor:
        self.aux = []
        return super().forward(x)

    def middle(self, h: Tensor) -> Tensor:
        self.aux.append(h.abs().mean())
        self.aux.append(0.1 * h.square().sum())
        return h * 2


@case("e2")
class DictOfLosses(Auxiliary):
    def middle(self, h: Tensor) -> Tensor:
        self.aux = {"norm": h.norm(), "mean": h.mean()}
        return h * 2

    def losses(self) -> list[Tensor]:
        return list(self.aux.values())


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 2)
        self.weight = 1.0

    def forward(self, h: Tensor, into: list[Tensor]) -> Tensor:
        chances = self.gate(h).softmax(-1)
        into.append(self.weight * chances.mean(0).square().sum())
        return h * chances[:, :1]


@case("e2")
class ListGivenToSubmodules(Auxiliary):
    """As in mixtures of experts: each layer adds its balance loss to the model's list."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def middle(self, h: Tensor) -> Tensor:
        self.aux = []
        for expert in self.experts:
            h = expert(h, self.aux)
        return h

    def change(self) -> None:
        self.experts[1].weight = 0.25


@case("e2")
class ListClearedAndFilled(Auxiliary):
    def __init__(self) -> None:
        super().__init__()
        self.aux: list[Tensor] = []

    def middle(self, h: Tensor) -> Tensor:
        self.aux.clear()
        self.aux.append(h.abs().mean())
        return h


@case("e2", breaks=True)
class NamespaceOfLosses(Auxiliary):
    def middle(self, h: Tensor) -> Tensor:
        self.aux = types.SimpleNamespace(norm=h.norm())
        return h

    def losses(self) -> list[Tensor]:
        return [self.aux.norm]


LOSSES: list[Tensor] = []


@case("e3", quick=True)
class GlobalList(Living):
    def middle(self, h: Tensor) -> Tensor:
        LOSSES.append(h.abs().mean())
        return h

    def loss(self, out: Tensor) -> Tensor:
        total = out.square().mean() + sum(LOSSES)
        LOSSES.clear()
        return total

    def observed(self) -> Any:
        return [t.detach() for t in LOSSES]

    def leave(self) -> None:
        restored(LOSSES, [])


class Collector:
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def add(self, h: Tensor) -> None:
        self.kept.append(h.mean())


@case("e3")
class ListOfAHelper(Living):
    def __init__(self) -> None:
        super().__init__()
        self.collector = Collector()

    def middle(self, h: Tensor) -> Tensor:
        self.collector.add(h)
        return h

    def loss(self, out: Tensor) -> Tensor:
        return out.square().mean() + self.collector.kept.pop()

    def observed(self) -> Any:
        return [t.detach() for t in self.collector.kept]


@case("e3", breaks=True)
class TensorHookKeepsGradients(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []

    def middle(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda grad: self.gradients.append(grad.clone()))
        return torch.sin(h)

    def observed(self) -> Any:
        return self.gradients


@case("e2", steady=False, quick=True)
class Counter(Living):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls

    def change(self) -> None:
        self.calls = 10

    def observed(self) -> Any:
        return self.calls


@case("e2", steady=False)
class CounterThatNothingReads(Counter):
    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h


@case("e2", steady=False)
class CounterOfASubmodule(Living):
    def __init__(self) -> None:
        super().__init__()
        self.first.calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.first.calls += 1
        return h if self.first.calls % 2 else torch.relu(h)

    def observed(self) -> Any:
        return self.first.calls


CALLS = 0


@case("e3", steady=False)
class GlobalCounter(Living):
    def middle(self, h: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return h * CALLS

    def observed(self) -> Any:
        return CALLS

    def leave(self) -> None:
        global CALLS
        CALLS = 0


@case("e2")
class RunningMeanAttribute(Living):
    """A tensor that is no buffer, replaced by each call."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(12)

    def middle(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean

    def observed(self) -> Any:
        return self.mean


@case("e2")
class RunningMeanInPlace(RunningMeanAttribute):
    def middle(self, h: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.mean


@case("e2", breaks=True, steady=False)
class RunningNumber(Living):
    def __init__(self) -> None:
        super().__init__()
        self.level = 1.0

    def middle(self, h: Tensor) -> Tensor:
        self.level = 0.9 * self.level + 0.1 * h.detach().abs().mean().item()
        return h / self.level

    def observed(self) -> Any:
        return self.level


@case("e2", steady=False)
class CacheOnSelf(Living):
    """A table made at the first call and found at the others."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def middle(self, h: Tensor) -> Tensor:
        if h.shape[1] not in self.tables:
            self.tables[h.shape[1]] = torch.linspace(0, 1, h.shape[1])
        return h + self.tables[h.shape[1]]

    def change(self) -> None:
        self.tables.clear()

    def observed(self) -> Any:
        return self.tables


@case("e2", steady=False)
class FirstCallInitializes(Living):
    """As ActNorm: the first batch decides the parameters' values."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(12))
        self.initialized = False

    def middle(self, h: Tensor) -> Tensor:
        if not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-h.mean(0))
            self.initialized = True
        return h + self.shift

    def observed(self) -> Any:
        return self.initialized


@case("e6", breaks=True, steady=False)
class IteratorOfScales(Living):
    def __init__(self) -> None:
        super().__init__()
        self.scales = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    def middle(self, h: Tensor) -> Tensor:
        return h * next(self.scales)

    def observed(self) -> Any:
        return self.scales.__length_hint__()


@case("e6", steady=False)
class CountOfItertools(Living):
    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)

    def middle(self, h: Tensor) -> Tensor:
        return h * next(self.calls)

    def observed(self) -> Any:
        return self.calls


@case("e6", breaks=True, steady=False)
class GeneratorOfPython(Living):
    def __init__(self) -> None:
        super().__init__()
        self.scales = (float(i) for i in range(1, 9))

    def middle(self, h: Tensor) -> Tensor:
        return h * next(self.scales)


@case("e3", steady=False)
class Deque(Living):
    def __init__(self) -> None:
        super().__init__()
        self.recent: collections.deque[Tensor] = collections.deque([torch.zeros(12)], maxlen=2)

    def middle(self, h: Tensor) -> Tensor:
        out = h - self.recent[0]
        self.recent.append(h.detach().mean(0))
        return out

    def observed(self) -> Any:
        return self.recent


@case("e3", steady=False)
class QueueOfFloats(Living):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = [0.0]

    def middle(self, h: Tensor) -> Tensor:
        self.history.append(self.history[-1] + 1)
        return h * len(self.history)

    def observed(self) -> Any:
        return self.history
