"""What training loops do to parameters, gradients and hooks (third wave)."""

import copy
from typing import Any

import numpy
import torch
from support.living.cases import HIDDEN, OUT, WIDTH, Living, Note, case, data
from torch import Tensor, nn
from torch.nn.utils import parametrize, vector_to_parameters
from torch.optim.swa_utils import AveragedModel


@case("e9")
class WeightsSwappedWithTheirAverage(Living):
    """As an average of weights is tried out: `.data` goes there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [p.detach().clone() * 0.5 for p in self.parameters()]

    def swap(self) -> None:
        for parameter, average in zip(self.parameters(), self.average, strict=True):
            parameter.data, average.data = average.data, parameter.data

    def before(self, step: int) -> None:
        self.swap()


@case("a4")
class AveragedModelBeside(Living):
    def __init__(self) -> None:
        super().__init__()
        self.beside: list[Any] = []

    def before(self, step: int) -> None:
        if not self.beside:
            self.beside.append(AveragedModel(self))
        self.beside[0].update_parameters(self)

    def observed(self) -> Any:
        return [p.detach() for b in self.beside for p in b.parameters()]


@case("e9")
class SharpnessAware(Living):
    """Two backwards a step, with other weights in the second."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        super().train_step(note, args, kwargs)
        moved = []
        with torch.no_grad():
            for p in self.parameters():
                moved.append(p.grad * 0.1)
                p.add_(moved[-1])
                p.grad = None
        super().train_step(note, args, kwargs)
        with torch.no_grad():
            for p, step in zip(self.parameters(), moved, strict=True):
                p.sub_(step)


@case("e9")
class GradientsInOneBuffer(Living):
    """Gradients are views of one flat buffer, and are zeroed, not dropped."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        flat = torch.zeros(sum(p.numel() for p in self.parameters()))
        offset = 0
        for p in self.parameters():
            p.grad = flat[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        super().train_step(note, args, kwargs)
        note("flat", flat)


@case("e9")
class HooksOfAccumulation(Living):
    """As DistributedDataParallel finds the nodes that accumulate gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: list[int] = []
        self.nodes: list[Any] = []

    def change(self) -> None:
        for i, p in enumerate(self.parameters()):
            node = p.expand_as(p).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, i=i: self.ready.append(i))
            self.nodes.append(node)

    def observed(self) -> Any:
        return sorted(self.ready)


@case("e9")
class HookBetweenForwardAndBackward(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        handle = self.second.weight.register_hook(lambda gradient: gradient * 3)
        self.loss(out).backward()
        handle.remove()


@case("e9", breaks=True)
class BackwardHookAfterTheForward(Living):
    """A hook on a module that comes after its forward has no effect on that backward."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        handle = self.second.register_full_backward_hook(lambda module, gave, got: (gave[0] * 3,))
        self.loss(out).backward()
        handle.remove()


@case("e9")
class HookTakesItselfAway(Living):
    """A hook for one call: set before it, gone after it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def before(self, step: int) -> None:
        def once(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out * 2

        if step in (1, 3):
            handle = self.first.register_forward_hook(once)
            self.handles = [handle]
        elif step == 2:
            self.handles.pop().remove()


@case("e9")
class HookPrepended(Living):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, args, out: out * 2)

    def change(self) -> None:
        self.first.register_forward_hook(lambda module, args, out: out + 1, prepend=True)


@case("e9")
class WeightsInOneVector(Living):
    def change(self) -> None:
        flat = torch.cat([p.detach().flatten() for p in self.parameters()]) * 0.5
        vector_to_parameters(flat, self.parameters())


@case("e9")
class StorageSet(Living):
    def change(self) -> None:
        with torch.no_grad():
            self.second.weight.set_((self.second.weight * 0.5).clone())


@case("e9")
class InitializedAnew(Living):
    def change(self) -> None:
        torch.manual_seed(5)
        self.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)


@case("e9")
class LayersSwapped(Living):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)

    def middle(self, h: Tensor) -> Tensor:
        return torch.sin(self.left(h)) + 2 * torch.tanh(self.right(h))

    def change(self) -> None:
        self.left, self.right = self.right, self.left


@case("e9")
class DictOfLayersRenamed(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a": nn.Linear(12, 12), "b": nn.Linear(12, 12)})

    def middle(self, h: Tensor) -> Tensor:
        for name in sorted(self.layers):
            h = torch.tanh(self.layers[name](h))
        return h

    def change(self) -> None:
        self.layers["z"] = self.layers.pop("a")


@case("e9")
class PenaltyOverParameters(Living):
    """Reads all parameters, and one comes later."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for n, p in self.named_parameters() if "weight" in n)
        return super().forward(x) + 0.01 * penalty

    def change(self) -> None:
        self.extra = nn.Linear(3, 3)


@case("e9")
class StatisticsTakenAway(Living):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(h)

    def change(self) -> None:
        self.norm.running_mean = self.norm.running_var = None
        self.norm.track_running_stats = False


@case("")
class DropoutInPlaceLater(Living):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def middle(self, h: Tensor) -> Tensor:
        return self.drop(torch.sin(h) * 1) * 2

    def change(self) -> None:
        self.drop.inplace = True


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@case("e17")
class ParametrizationCached(Living):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.first, "weight", Doubled())

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        with parametrize.cached():
            super().train_step(note, args, kwargs)


@case("a4")
class CopiedBetweenForwardAndBackward(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        other = copy.deepcopy(self)
        self.loss(out).backward()
        note("copy", other(args[0] * 0.5))


@case("e10", shows=False)
class NumberOfArguments(Living):
    def forward(self, x: Tensor, *more: Tensor, **named: Any) -> Tensor:
        h = torch.tanh(self.first(x))
        for other in more:
            h = h + other
        return self.second(h * named.get("gain", 1.0))

    def inputs(self, step: int) -> Any:
        more = tuple(data(i, 64, HIDDEN) for i in range(max(0, step - 1)))
        return (data(step), *more), {"gain": 2.0} if step == 3 else {}


@case("e10")
class TensorBecomesANumber(Living):
    def forward(self, x: Tensor, gain: Any) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * gain)

    def inputs(self, step: int) -> Any:
        return (data(step), torch.tensor(0.3) if step < 2 else 0.3), {}


@case("e10", breaks=True)
class ArrayArgument(Living):
    """An array of NumPy that is given, as data loaders hand it out."""

    def forward(self, x: Tensor, table: Any) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h * torch.from_numpy(table))

    def inputs(self, step: int) -> Any:
        return (data(step), numpy.linspace(0, step + 1, 12, dtype=numpy.float32)), {}


@case("e10")
class FloatOfEachStep(Living):
    """A temperature that falls: another number in each step."""

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        return self.second(torch.tanh(self.first(x)) / temperature)

    def inputs(self, step: int) -> Any:
        return (data(step),), {"temperature": (2.0, 2.0, 1.5, 1.0)[step]}


@case("e17", shows=False)
class ReturnsMoreThanTensors(Living):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        names = [type(m).__name__ for m in self.children()]
        return {"out": out, "names": names, "count": len(names), "none": None, "x": (x.shape, x)}

    def loss(self, out: Any) -> Tensor:
        return out["out"].square().mean()

    def change(self) -> None:
        self.extra = nn.Identity()


@case("e8")
class OutputChangedInPlaceByTheCaller(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        out.add_(1.0).mul_(0.5)
        note("output", out)
        self.loss(out).backward()


@case("e9")
class FrozenInTheMiddleOfAStep(Living):
    """`requires_grad` goes off between forward and backward: the graph still leads there."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        self.second.weight.requires_grad_(False)
        self.loss(out).backward()
        self.second.weight.requires_grad_(True)


@case("e9")
class GradientSetByHand(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        for p in self.parameters():
            p.grad = torch.ones_like(p)
        super().train_step(note, args, kwargs)


@case("e9")
class LargerHead(Living):
    """More classes: the last layer is another one, of another size."""

    def change(self) -> None:
        self.second = nn.Linear(HIDDEN, OUT + 2)


@case("e9")
class EmbeddingResized(Living):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return super().forward(x + self.table(ids))

    def inputs(self, step: int) -> Any:
        return (data(step), torch.arange(64) % 10), {}

    def change(self) -> None:
        larger = nn.Embedding(12, WIDTH)
        with torch.no_grad():
            larger.weight[:10].copy_(self.table.weight)
        self.table = larger
