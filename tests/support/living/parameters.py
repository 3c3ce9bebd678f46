"""Parameters, buffers and layers that change after planning (findings E9, E17)."""

import warnings
from typing import Any

import torch
from support.living.cases import Living, case, data
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


class Layered(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def middle(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


def new_layer() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(12, 12)


@case("e9", quick=True)
class BufferSetLater(Living):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def middle(self, h: Tensor) -> Tensor:
        return h if self.mask is None else h * self.mask

    def change(self) -> None:
        self.mask = torch.linspace(0, 1, 12)


@case("e9")
class ParameterSetLater(Living):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("gain", None)

    def middle(self, h: Tensor) -> Tensor:
        return h if self.gain is None else h * self.gain

    def change(self) -> None:
        self.gain = nn.Parameter(torch.linspace(0, 1, 12))


@case("e9")
class ParameterTakenAway(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0, 1, 12))

    def middle(self, h: Tensor) -> Tensor:
        return h if self.gain is None else h * self.gain

    def change(self) -> None:
        self.gain = None


@case("e9")
class BiasTakenAway(Living):
    def change(self) -> None:
        self.first.bias = None


@case("e9")
class BufferReplaced(BufferSetLater):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(12)


@case("e9")
class BufferOfAnotherDtype(BufferReplaced):
    def change(self) -> None:
        self.mask = torch.linspace(0, 1, 12).double()


@case("e9", quick=True)
class WeightsUntied(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight

    def change(self) -> None:
        self.layers[1].weight = nn.Parameter(self.layers[0].weight.detach() * 0.5)


@case("e9")
class WeightsTied(Layered):
    def change(self) -> None:
        self.layers[1].weight = self.layers[0].weight


@case("e9")
class TiedByView(Living):
    """The head reads the transposed weight of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        weight = self.first.weight.t() if self.head is None else self.head
        return nn.functional.linear(h, weight)

    def change(self) -> None:
        self.head = nn.Parameter(self.first.weight.detach().t().clone() * 0.5)


@case("e17", quick=True)
class LayerAppended(Layered):
    def change(self) -> None:
        self.layers.append(new_layer())


@case("e17")
class LayerRemoved(Layered):
    def change(self) -> None:
        del self.layers[1]


@case("e17")
class LayersReordered(Layered):
    def change(self) -> None:
        self.layers = nn.ModuleList(reversed(list(self.layers)))


@case("e17")
class LayerReplaced(Layered):
    def change(self) -> None:
        self.layers[0] = nn.Sequential(new_layer(), nn.ReLU())


@case("e17")
class SameLayerTwice(Layered):
    def change(self) -> None:
        self.layers[2] = self.layers[0]


class InSequence(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU())

    def middle(self, h: Tensor) -> Tensor:
        return self.layers(h)


@case("e17")
class SequenceReordered(InSequence):
    def change(self) -> None:
        self.layers[1], self.layers[3] = self.layers[3], self.layers[1]


@case("e17")
class SequenceGrows(InSequence):
    def change(self) -> None:
        self.layers.append(nn.Sigmoid())


@case("e17", quick=True)
class Pruned(Living):
    def change(self) -> None:
        prune.l1_unstructured(self.first, "weight", 0.5)


@case("e17")
class PruningMadePermanent(Living):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.first, "weight", 0.5)

    def change(self) -> None:
        prune.remove(self.first, "weight")


@case("e17")
class PrunedFurther(Living):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.first, "weight", 0.2)

    def change(self) -> None:
        prune.ln_structured(self.first, "weight", 0.5, n=2, dim=0)


@case("e17")
class WeightNormAdded(Living):
    def change(self) -> None:
        parametrizations.weight_norm(self.first)


@case("e17")
class WeightNormRemoved(Living):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)

    def change(self) -> None:
        parametrize.remove_parametrizations(self.first, "weight")


@case("e17")
class OldWeightNormAdded(Living):
    def change(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.first)


@case("e17")
class OldWeightNormRemoved(Living):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(self.first)

    def change(self) -> None:
        nn.utils.remove_weight_norm(self.first)


@case("e17")
class SpectralNormAdded(Living):
    def change(self) -> None:
        torch.manual_seed(5)
        parametrizations.spectral_norm(self.first)


@case("e17")
class SpectralNormRemoved(Living):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.first)

    def change(self) -> None:
        parametrize.remove_parametrizations(self.first, "weight")


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).t()


@case("e17")
class ParametrizationAdded(Layered):
    def change(self) -> None:
        parametrize.register_parametrization(self.layers[0], "weight", Symmetric())


@case("e9")
class Frozen(Layered):
    def change(self) -> None:
        self.first.requires_grad_(False)
        self.layers[0].weight.requires_grad_(False)


@case("e9")
class Unfrozen(Layered):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)

    def change(self) -> None:
        self.first.requires_grad_(True)


@case("e9", steady=False)
class FrozenInTurn(Layered):
    """Alternating training, as of a generator and a discriminator."""

    def before(self, step: int) -> None:
        for i, layer in enumerate(self.layers):
            layer.requires_grad_(i % 2 == step % 2)


@case("e9")
class StateLoaded(Layered):
    def change(self) -> None:
        self.load_state_dict({k: v * 0.5 for k, v in self.state_dict().items()})


@case("e9")
class StateAssigned(Layered):
    def change(self) -> None:
        state = {k: v.detach().clone() * 0.5 for k, v in self.state_dict().items()}
        self.load_state_dict(state, assign=True)


@case("e9")
class ToDoubleAndBack(Layered):
    def before(self, step: int) -> None:
        if step > 1:
            self.to(torch.float64 if step == 2 else torch.float32)

    def inputs(self, step: int) -> Any:
        return (data(step).to(torch.float64 if step == 2 else torch.float32),), {}


@case("e9")
class ToBfloat16(Layered):
    def before(self, step: int) -> None:
        if step > 1:
            self.to(torch.bfloat16)

    def inputs(self, step: int) -> Any:
        return (data(step).to(torch.bfloat16 if step > 1 else torch.float32),), {}


@case("e9")
class ParameterReplaced(Layered):
    def change(self) -> None:
        self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach() * 0.5)


@case("e9")
class DataReplaced(Layered):
    def change(self) -> None:
        self.layers[0].weight.data = self.layers[0].weight.data * 0.5


@case("e9")
class DataTransposed(Layered):
    """Another memory layout behind the same parameter."""

    def change(self) -> None:
        weight = self.layers[0].weight
        weight.data = weight.data.t().contiguous().t()


@case("e9")
class ParameterWritten(Layered):
    def change(self) -> None:
        with torch.no_grad():
            self.layers[0].weight.mul_(0.5)
            self.layers[1].weight.zero_()


@case("e9")
class ParameterListGrows(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(12)) for _ in range(2))

    def middle(self, h: Tensor) -> Tensor:
        for gain in self.gains:
            h = torch.sin(h * gain)
        return h

    def change(self) -> None:
        self.gains.append(nn.Parameter(torch.full((12,), 0.5)))


@case("e9")
class ParameterDictChanges(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterDict({"a": nn.Parameter(torch.ones(12))})

    def middle(self, h: Tensor) -> Tensor:
        for name in sorted(self.gains):
            h = torch.sin(h * self.gains[name])
        return h

    def change(self) -> None:
        self.gains["b"] = nn.Parameter(torch.full((12,), 0.5))
