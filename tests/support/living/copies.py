"""Copies of a managed model, and what its class is asked (findings A4, E17)."""

import copy
import io
import pickle
from typing import Any, ClassVar

import torch
from support.living.ambient import Dropping
from support.living.cases import Living, case, data
from torch import Tensor, nn

import rekindle


@case("a4", shows=False, quick=True)
class Pickled(Dropping):
    """A pickle is of the model that is managed; plans are files of their own."""

    def before(self, step: int) -> nn.Module | None:
        return pickle.loads(pickle.dumps(self)) if step == 2 else None


@case("a4", shows=False)
class Saved(Dropping):
    def before(self, step: int) -> nn.Module | None:
        if step != 2:
            return None
        file = io.BytesIO()
        torch.save(self, file)
        file.seek(0)
        return torch.load(file, weights_only=False)


@case("a4")
class DeeplyCopied(Dropping):
    """The copy is managed, and is another model."""

    def before(self, step: int) -> nn.Module | None:
        if step != 2:
            return None
        new = copy.deepcopy(self)
        with torch.no_grad():
            self.first.weight.zero_()
        return new


@case("a4", shows=False)
class AverageOfWeights(Dropping):
    """A deep copy whose parameters follow, called in between."""

    def before(self, step: int) -> None:
        if step == 1:
            self.follower = [copy.deepcopy(self)]
        if step > 1:
            with torch.no_grad():
                for ours, theirs in zip(
                    self.parameters(), self.follower[0].parameters(), strict=True
                ):
                    theirs.lerp_(ours, 0.5)
            self.got = self.follower[0](data(90)).detach()

    def observed(self) -> Any:
        return getattr(self, "got", None)


@case("a4")
class ManagedTwice(Dropping):
    def before(self, step: int) -> nn.Module | None:
        if step != 2 or not hasattr(self, "plans"):
            return None
        args, kwargs = self.inputs(0)
        return rekindle.rematerialize(self, args, kwargs, budget=1.0, profile="estimate")


class Registry(Living):
    kinds: ClassVar[list[str]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__name__ in Registry.kinds:
            raise TypeError(f"{cls.__name__} is registered already")
        Registry.kinds.append(cls.__name__)


@case("e17", quick=True)
class InARegistry(Registry):
    def observed(self) -> Any:
        return sorted(Registry.kinds)


@case("e17")
class AsksForItsClass(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if type(self) is AsksForItsClass else h * 3


@case("e17")
class AsksForItsClassByAttribute(Living):
    def middle(self, h: Tensor) -> Tensor:
        known = self.__class__ is AsksForItsClassByAttribute
        return h * 2 if known and self.__class__.__mro__[1] is Living else h * 3


@case("e17")
class AsksForItsName(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * len(type(self).__name__) / len(type(self).__qualname__)


@case("e17")
class FinalClass(Living):
    """A class whose metaclass counts what is made of it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        assert cls is FinalClass
        return super().__new__(cls)


@case()
class ManyOfOneClass(Dropping):
    """More copies than Dynamo keeps compiled versions of one function."""

    def __init__(self) -> None:
        super().__init__()
        self._scale = 1.0

    def middle(self, h: Tensor) -> Tensor:
        return super().middle(h) * self._scale

    def change(self) -> None:
        self.got = []
        for i in range(12):
            other = copy.deepcopy(self)
            other._scale = 1.0 + i
            self.got.append(other(data(60 + i)).detach())

    def observed(self) -> Any:
        return getattr(self, "got", None)
