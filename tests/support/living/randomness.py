"""Random numbers that are not the default stream's, and seeds set by the model (E1, E5, E6)."""

import random
from typing import Any

import numpy
import torch
from support.living.cases import Living, case, data
from torch import Tensor


@case("e6", breaks=True, quick=True)
class NumpyRandom(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * float(numpy.random.rand())  # noqa: NPY002


@case("e6", breaks=True)
class NumpyRandomBranch(Living):
    """LayerDrop with NumPy's stream."""

    def middle(self, h: Tensor) -> Tensor:
        return h if numpy.random.uniform() < 0.5 else h * h  # noqa: NPY002


@case("e6", breaks=True)
class NumpyNoise(Living):
    def middle(self, h: Tensor) -> Tensor:
        noise = numpy.random.normal(size=(64, 12)).astype(numpy.float32)  # noqa: NPY002
        return h + torch.from_numpy(noise)


@case("e6", breaks=True)
class OwnNumpyGenerator(Living):
    def __init__(self) -> None:
        super().__init__()
        self.source = numpy.random.default_rng(3)

    def middle(self, h: Tensor) -> Tensor:
        return h * float(self.source.random())

    def observed(self) -> Any:
        return self.source


@case("e6", breaks=True)
class PythonRandom(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * random.random()


@case("e6", breaks=True)
class PythonRandomBranch(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h if random.uniform(0, 1) < 0.5 else torch.relu(h)


@case("e6", breaks=True)
class PythonRandomShuffles(Living):
    def middle(self, h: Tensor) -> Tensor:
        order = list(range(3))
        random.shuffle(order)
        for i in order:
            h = (torch.sin, torch.tanh, torch.relu)[i](h)
        return h


@case("e6", breaks=True, quick=True)
class OwnRandom(Living):
    def __init__(self) -> None:
        super().__init__()
        self.source = random.Random(3)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.source.random()

    def observed(self) -> Any:
        return self.source


class OwnGenerator(Living):
    """Every run draws from the model's own stream, once."""

    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(11)

    def observed(self) -> Any:
        return self.source


@case("e1")
class OwnGeneratorRand(OwnGenerator):
    def middle(self, h: Tensor) -> Tensor:
        return h * torch.rand(h.shape, generator=self.source)


@case("e1")
class OwnGeneratorBernoulli(OwnGenerator):
    def middle(self, h: Tensor) -> Tensor:
        keep = torch.bernoulli(torch.full_like(h, 0.5), generator=self.source)
        return torch.sin(h * keep)


@case("e1", quick=True)
class OwnGeneratorDropout(OwnGenerator):
    """Dropout by hand, its mask drawn in place, with the default stream's dropout around it."""

    def middle(self, h: Tensor) -> Tensor:
        h = torch.nn.functional.dropout(h, 0.3)
        mask = torch.empty_like(h).bernoulli_(0.7, generator=self.source) / 0.7
        return torch.nn.functional.dropout(torch.sin(h * mask), 0.3)


@case("e1")
class OwnGeneratorNormal(OwnGenerator):
    def middle(self, h: Tensor) -> Tensor:
        return torch.tanh(h + torch.empty_like(h).normal_(0.0, 0.2, generator=self.source))


@case("e1")
class OwnGeneratorUniformTwice(OwnGenerator):
    def middle(self, h: Tensor) -> Tensor:
        h = torch.sin(h + torch.empty_like(h).uniform_(generator=self.source))
        return torch.sin(h * torch.randn(h.shape, generator=self.source))


@case("e1")
class OwnGeneratorPermutes(OwnGenerator):
    def middle(self, h: Tensor) -> Tensor:
        return h + h[torch.randperm(h.shape[0], generator=self.source)]


@case("e1")
class OwnGeneratorMultinomial(OwnGenerator):
    def middle(self, h: Tensor) -> Tensor:
        weights = torch.ones(h.shape[0])
        return h + h[torch.multinomial(weights, 64, replacement=True, generator=self.source)]


@case("e1")
class OwnGeneratorReseeded(OwnGeneratorRand):
    def change(self) -> None:
        self.source.manual_seed(99)


@case("e1")
class OwnGeneratorReplaced(OwnGeneratorRand):
    def change(self) -> None:
        self.source = torch.Generator().manual_seed(99)


@case("e1", breaks=True)
class OwnGeneratorMadeInForward(Living):
    def middle(self, h: Tensor) -> Tensor:
        source = torch.Generator().manual_seed(5)
        return h * torch.rand(h.shape, generator=source)


@case("e1")
class GeneratorArgument(Living):
    def __init__(self) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(11)

    def forward(self, x: Tensor, source: torch.Generator) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(torch.sin(h * torch.rand(h.shape, generator=source)))

    def inputs(self, step: int) -> Any:
        return (data(step), self.source), {}

    def observed(self) -> Any:
        return self.source


@case("e1")
class TwoGenerators(OwnGenerator):
    """Two streams that start alike; after the change both names mean one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.Generator().manual_seed(11)

    def middle(self, h: Tensor) -> Tensor:
        h = torch.sin(h * torch.rand(h.shape, generator=self.source))
        return torch.sin(h * torch.rand(h.shape, generator=self.other))

    def change(self) -> None:
        self.other = self.source

    def observed(self) -> Any:
        return self.source, self.other


@case("e1")
class DefaultGeneratorByName(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * torch.rand(h.shape, generator=torch.default_generator)


@case("e5", breaks=True, quick=True)
class SeedSetInForward(Living):
    def middle(self, h: Tensor) -> Tensor:
        torch.manual_seed(5)
        return torch.sin(h * torch.rand_like(h))


@case("e5", breaks=True)
class ForkedStream(Living):
    def middle(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            mask = torch.rand_like(h)
        return torch.sin(h * mask + torch.rand_like(h))


@case("e5", breaks=True)
class StreamPutBack(Living):
    """The same mask in both places, as reversible layers draw it."""

    def middle(self, h: Tensor) -> Tensor:
        state = torch.get_rng_state()
        h = torch.nn.functional.dropout(h, 0.5)
        torch.set_rng_state(state)
        return torch.nn.functional.dropout(torch.sin(h), 0.5)


@case("e5", breaks=True)
class SeedFromACounter(Living):
    def __init__(self) -> None:
        super().__init__()
        self.seed = 3

    def middle(self, h: Tensor) -> Tensor:
        torch.manual_seed(self.seed)
        return torch.sin(h * torch.rand_like(h))

    def change(self) -> None:
        self.seed = 4


@case("e5")
class SeededBetween(Living):
    """The caller sets the stream: nothing of a plan may remember the old one."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.nn.functional.dropout(torch.sin(h), 0.5)

    def change(self) -> None:
        torch.manual_seed(123)


@case()
class DropoutProbability(Living):
    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.2)

    def middle(self, h: Tensor) -> Tensor:
        return self.drop(torch.sin(h))

    def change(self) -> None:
        self.drop.p = 0.6


@case(breaks=True, steady=False)
class LayerDrop(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h if torch.rand(()) < 0.5 else h * h


@case(breaks=True)
class LayerDropOfZero(Living):
    """The answer of `rand() < 0.0` is known, but the draw is made."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.nn.functional.dropout(h if torch.rand(()) < 0.0 else h * h, 0.2)
