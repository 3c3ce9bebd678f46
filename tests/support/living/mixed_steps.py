"""Kinds of change mixed in one step (second wave): between forward and backward, in other threads,
over accumulated gradients."""

import threading
from typing import Any

import torch
from support.living.cases import OUT, WIDTH, Living, Note, case, data
from support.living.mixed_models import Shares
from torch import Tensor, nn


class Between(Shares):
    """Something changes between forward and backward: eager's backward does not read it."""

    def meddle(self) -> None:
        pass

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        self.meddle()
        self.loss(out).backward()


@case("mix")
class ListChangedBeforeTheBackward(Between):
    def meddle(self) -> None:
        self.block.scales[0] += 0.5

    def before(self, step: int) -> None:
        self.block.scales[0] = 1.0


@case("mix")
class EvalBeforeTheBackward(Between):
    def meddle(self) -> None:
        self.eval()

    def before(self, step: int) -> None:
        self.train()


@case("mix")
class SeedBeforeTheBackward(Between):
    """Recomputed dropout is the forward's, and the stream of the caller stays his."""

    def meddle(self) -> None:
        torch.manual_seed(1)
        torch.rand(3)


@case("mix")
class AutocastAroundTheBackward(Between):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        loss = self.loss(out)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()


@case("mix")
class DefaultDtypeBeforeTheBackward(Between):
    def meddle(self) -> None:
        torch.set_default_dtype(torch.float64)

    def before(self, step: int) -> None:
        torch.set_default_dtype(torch.float32)

    def leave(self) -> None:
        torch.set_default_dtype(torch.float32)


@case("mix")
class WeightReplacedBeforeTheBackward(Between):
    """The graph holds the old weight; its gradient goes there."""

    def meddle(self) -> None:
        self.old = [self.second.weight]
        self.second.weight = nn.Parameter(self.second.weight.detach() * 0.5)

    def observed(self) -> Any:
        return [w.grad for w in getattr(self, "old", ())]


@case("mix")
class LayerRemovedBeforeTheBackward(Between):
    def meddle(self) -> None:
        self.tied, self.kept = nn.Identity(), [self.tied]

    def before(self, step: int) -> None:
        if hasattr(self, "kept"):
            self.tied = self.kept[0]


@case("mix")
class BackwardInAnotherThread(Between):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        thread = threading.Thread(target=self.loss(out).backward)
        thread.start()
        thread.join()


@case("mix", steady=False)
class AccumulatedOverAChange(Shares):
    """Two micro-batches for one step of the optimizer, and a change between them."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        super().train_step(note, args, kwargs)
        self.block.scales.append(0.125)
        super().train_step(note, (args[0] * 0.5,), kwargs)
        self.block.scales.pop()

    def before(self, step: int) -> None:
        pass


@case("mix")
class BackwardsInReverse(Shares):
    """Two calls, the later one's backward first, and other Python between them."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        first = self(*args, **kwargs)
        self.tied.scales[1] = 0.75
        second = self(args[0] * 0.5)
        self.tied.scales[1] = 0.5
        note("output", (first, second))
        self.loss(second).backward()
        self.loss(first).backward()


@case("mix")
class ForwardsWithoutBackward(Shares):
    """Calls whose graphs are thrown away draw from the stream as eager does."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        self(*args, **kwargs)
        super().train_step(note, args, kwargs)


@case("mix")
class OptimizerInTheBackward(Shares):
    """A parameter is updated as soon as its gradient is complete: recomputing must not see it."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.update)

    @staticmethod
    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    def change(self) -> None:
        self.block.scales[1] = 0.25


@case("mix", breaks=True)
class ContextOfItsOwn(Living):
    """A context manager of the model's that counts and changes a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.scale = 2.0

    def __enter__(self) -> None:
        self.inside = True

    def __exit__(self, *raised: Any) -> None:
        self.inside = False

    def middle(self, h: Tensor) -> Tensor:
        with self:
            return self.scaled(h)

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.scale if self.inside else h

    def change(self) -> None:
        self.scale = 3.0

    def observed(self) -> Any:
        return self.inside


@case("mix")
class CallsItself(Living):
    """Recursion, to a depth that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 2
        self.mix = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.deeper(self.first(x), self.depth))

    def deeper(self, h: Tensor, left: int) -> Tensor:
        return h if left == 0 else self.deeper(torch.tanh(self.mix(h)), left - 1)

    def change(self) -> None:
        self.depth = 3


@case("mix")
class EmbeddingRenormalizes(Living):
    """`max_norm` writes the weight in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12, max_norm=1.0)

    def forward(self, words: Tensor) -> Tensor:
        return self.second(torch.sin(self.table(words)).mean(1))

    def inputs(self, step: int) -> Any:
        return ((data(step, 64, 5).abs() * 5).long().clamp(max=19),), {}

    def change(self) -> None:
        self.table.max_norm = 0.5


@case("mix", steady=False)
class ShapesComeAndGo(Shares):
    """Three batch sizes, with a change while another one is in use."""

    def inputs(self, step: int) -> Any:
        return (data(step, (64, 32, 48, 64)[step], WIDTH),), {}

    def before(self, step: int) -> None:
        if step == 2:
            self.block.scales[0] = 0.25


@case("mix")
class NormTwiceBeforeOneBackward(Living):
    """Running statistics are written by both calls, the momentum changes between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def middle(self, h: Tensor) -> Tensor:
        return self.norm(torch.sin(h))

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        first, second = self(*args, **kwargs), self(args[0] * 0.5)
        note("output", (first, second))
        self.loss(first).backward()
        self.loss(second).backward()

    def change(self) -> None:
        self.norm.momentum = 0.7


@case("mix")
class MaskedDepth(Living):
    """Stochastic depth without a branch; its chances are a list."""

    def __init__(self) -> None:
        super().__init__()
        self.chances = [0.9, 0.5]
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in self.chances)

    def middle(self, h: Tensor) -> Tensor:
        for layer, chance in zip(self.layers, self.chances, strict=True):
            kept = (torch.rand(h.shape[0], 1) < chance) / chance
            h = h + torch.tanh(layer(h)) * kept
        return h

    def change(self) -> None:
        self.chances[1] = 0.25


@case("mix")
class CompiledPart(Shares):
    """A submodule that the user has compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.block.compile(backend="eager")

    def change(self) -> None:
        self.block.scales[0] = 0.25


@case("mix")
class LossOfSeveralOutputs(Living):
    """The gradient arrives for other outputs than before."""

    both = False

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        return self.second(h), torch.sin(h)[:, :OUT]

    def loss(self, out: Any) -> Tensor:
        return out[0].square().mean() + (out[1].square().mean() if self.both else 0)

    def change(self) -> None:
        self.both = True
