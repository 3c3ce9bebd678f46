"""What a forward reads through Python's less usual ways (third wave): descriptors, caches, weak
references, containers of its own kind, numbers that are equal and not the same."""

import abc
import collections
import contextlib
import dataclasses
import fractions
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from support.living.cases import Living, case
from torch import Tensor, nn


class Stored:
    """A data descriptor."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"stored_{name}"

    def __get__(self, owner: Any, cls: type) -> Any:
        return self if owner is None else owner.__dict__[self.name] * 2

    def __set__(self, owner: Any, value: float) -> None:
        owner.__dict__[self.name] = value


@case("e4")
class Descriptor(Living):
    scale = Stored()

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale

    def change(self) -> None:
        self.scale = 0.75


@case("e4")
class CachedProperty(Living):
    """Computed once, kept in the object's dictionary, and forgotten at the change."""

    base = 2.0

    @functools.cached_property
    def scale(self) -> float:
        return self.base + 1

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.scale

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scale

    def change(self) -> None:
        del self.__dict__["scale"]
        self.base = 0.25
        self.seen = self.scale


@case("e4")
class AttributesOfATable(Living):
    """`__getattr__` of the model's own finds numbers in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"gain": 2.0}

    def __getattr__(self, name: str) -> Any:
        if name in ("gain",):
            return self.__dict__["table"][name]
        return super().__getattr__(name)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.gain

    def change(self) -> None:
        self.table["gain"] = -1.5


class Settings:
    """Attributes by delegation, as configurations have them."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["values"] = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["values"][name]
        except KeyError:
            raise AttributeError(name) from None


@case("e4")
class DelegatingConfig(Living):
    def __init__(self) -> None:
        super().__init__()
        self.config = Settings(gain=2.0)

    def middle(self, h: Tensor) -> Tensor:
        shift = getattr(self.config, "shift", 0.0)
        return h * self.config.gain + shift

    def change(self) -> None:
        self.config.values["shift"] = 0.5


class Slotted:
    __slots__ = ("gain", "shift")

    def __init__(self) -> None:
        self.gain = 2.0


@case("e4")
class SlotFilledLater(Living):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slotted()

    def middle(self, h: Tensor) -> Tensor:
        if hasattr(self.slots, "shift"):
            h = h + self.slots.shift
        return h * self.slots.gain

    def change(self) -> None:
        self.slots.shift = 0.5


@dataclasses.dataclass(frozen=True)
class Fixed:
    gain: float = 2.0
    power: int = 2


@case("e4")
class FrozenDataclassReplaced(Living):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = Fixed()

    def middle(self, h: Tensor) -> Tensor:
        return (h * self.fixed.gain) ** self.fixed.power

    def change(self) -> None:
        self.fixed = dataclasses.replace(self.fixed, power=3)


class Meta(type):
    gain = 2.0


class OfMeta(metaclass=Meta):
    pass


@case("e4")
class AttributeOfAMetaclass(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h * OfMeta.gain

    def change(self) -> None:
        Meta.gain = 0.5

    def leave(self) -> None:
        Meta.gain = 2.0


@case("e4")
class PartialMethod(Living):
    def scaled(self, h: Tensor, gain: float) -> Tensor:
        return h * gain * self.extra

    doubled = functools.partialmethod(scaled, gain=2.0)
    extra = 1.0

    def middle(self, h: Tensor) -> Tensor:
        return self.doubled(h)

    def change(self) -> None:
        self.extra = -0.5


BASE = [2.0]


@functools.lru_cache
def cached_scale(key: int) -> float:
    return BASE[0] * key


@case("e4", breaks=True)
class LruCache(Living):
    """What is cached stays after its origin has changed, until the cache is cleared."""

    def middle(self, h: Tensor) -> Tensor:
        return h * cached_scale(3)

    def before(self, step: int) -> None:
        if step == 1:
            BASE[0] = 5.0
        if step == 2:
            cached_scale.cache_clear()

    def leave(self) -> None:
        BASE[0] = 2.0
        cached_scale.cache_clear()


class Target:
    def __init__(self, gain: float) -> None:
        self.gain = gain


@case("e4")
class WeakReference(Living):
    """The target is changed, then it dies."""

    def __init__(self) -> None:
        super().__init__()
        self.targets = [Target(2.0)]
        self.weak = weakref.ref(self.targets[0])

    def middle(self, h: Tensor) -> Tensor:
        target = self.weak()
        return h if target is None else h * target.gain

    def before(self, step: int) -> None:
        if step == 2:
            self.targets[0].gain = 0.5
        if step == 3:
            self.targets.clear()


@case("e4")
class ChainOfMaps(Living):
    def __init__(self) -> None:
        super().__init__()
        self.maps = collections.ChainMap({}, {"gain": 2.0})

    def middle(self, h: Tensor) -> Tensor:
        return h * self.maps["gain"]

    def change(self) -> None:
        self.maps.maps[0]["gain"] = 0.5


@case("e4")
class OrderedDictTurned(Living):
    def __init__(self) -> None:
        super().__init__()
        self.steps = collections.OrderedDict(sin=torch.sin, tanh=torch.tanh)

    def middle(self, h: Tensor) -> Tensor:
        for function in self.steps.values():
            h = function(h) * 2
        return h

    def change(self) -> None:
        self.steps.move_to_end("sin")


@case("e4")
class DefaultDict(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gains: dict[str, float] = collections.defaultdict(lambda: 2.0)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.gains["middle"]

    def change(self) -> None:
        self.gains["middle"] = 0.5


class Missing(dict[str, float]):
    other = 2.0

    def __missing__(self, key: str) -> float:
        return self.other


@case("e4")
class MissingKeyOfADict(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gains = Missing()

    def middle(self, h: Tensor) -> Tensor:
        return h * self.gains["middle"]

    def change(self) -> None:
        self.gains.other = 0.5


class Doubling(list[float]):
    factor = 2.0

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) * self.factor


@case("e4")
class ListOfItsOwnKind(Living):
    def __init__(self) -> None:
        super().__init__()
        self.scales = Doubling([1.0, 0.5])

    def middle(self, h: Tensor) -> Tensor:
        return h * self.scales[1]

    def change(self) -> None:
        self.scales.factor = 3.0


@case("e4")
class RangeAndSlice(Living):
    def __init__(self) -> None:
        super().__init__()
        self.range, self.part = range(1, 4), slice(0, 6)

    def middle(self, h: Tensor) -> Tensor:
        for i in self.range:
            h = h + i * 0.1
        return torch.cat([h[:, self.part] * 2, h[:, self.part.stop :]], dim=1)

    def before(self, step: int) -> None:
        if step == 2:
            self.range = range(1, 5)
        if step == 3:
            self.part = slice(0, 3)


class Number:
    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    def __bool__(self) -> bool:
        return self.value > 1

    def __len__(self) -> int:
        return int(self.value)

    def __contains__(self, item: float) -> bool:
        return item < self.value


@case("e4", breaks=True)
class AskedAsANumber(Living):
    def __init__(self) -> None:
        super().__init__()
        self.number = Number(2.0)

    def middle(self, h: Tensor) -> Tensor:
        if self.number:
            h = h * 2
        if 1.5 in self.number:
            h = torch.sin(h)
        return h * len(self.number) * float(self.number)

    def change(self) -> None:
        self.number.value = 1.25


@case("e4", breaks=True)
class FractionAttribute(Living):
    def __init__(self) -> None:
        super().__init__()
        self.part = fractions.Fraction(1, 3)

    def middle(self, h: Tensor) -> Tensor:
        return h * float(self.part)

    def change(self) -> None:
        self.part = fractions.Fraction(2, 3)


@case("e4")
class ZeroChangesItsSign(Living):
    """0.0 == -0.0, and what is computed from them differs."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = 0.0

    def middle(self, h: Tensor) -> Tensor:
        return torch.atan2(torch.full_like(h, self.zero), -h.square() - 1) + h

    def change(self) -> None:
        self.zero = -0.0


@case("e4")
class ZeroInATupleChangesItsSign(ZeroChangesItsSign):
    def __init__(self) -> None:
        super().__init__()
        self.zeros = (0.0, 1.0)

    def middle(self, h: Tensor) -> Tensor:
        return torch.atan2(torch.full_like(h, self.zeros[0]), -h.square() - 1) + h

    def change(self) -> None:
        self.zeros = (-0.0, 1.0)


@case("e4")
class ZeroArgumentChangesItsSign(Living):
    def forward(self, x: Tensor, zero: float = 0.0) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(torch.atan2(torch.full_like(h, zero), -h.square() - 1) + h)

    def inputs(self, step: int) -> Any:
        (x,), _ = super().inputs(step)
        return (x,), {"zero": 0.0 if step < 2 else -0.0}


@case("e4")
class OneBecomesTrue(Living):
    """1 == True == 1.0, and each gives a tensor of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.one: Any = 1

    def middle(self, h: Tensor) -> Tensor:
        one = torch.tensor(self.one)
        return h * (2 if one.dtype is torch.int64 else 3 if one.dtype is torch.bool else 4)

    def before(self, step: int) -> None:
        self.one = (1, 1, True, 1.0)[step]


@case("e4", breaks=True)
class SetOfEqualNumbers(OneBecomesTrue):
    def __init__(self) -> None:
        super().__init__()
        self.ones: Any = frozenset({1})

    def middle(self, h: Tensor) -> Tensor:
        (one,) = self.ones
        return h * (2 if isinstance(one, int) else 3)

    def before(self, step: int) -> None:
        self.ones = frozenset({(1, 1, 1.0, 1)[step]})


@case("e4")
class NotANumber(Living):
    def __init__(self) -> None:
        super().__init__()
        self.limit = float("nan")

    def middle(self, h: Tensor) -> Tensor:
        return h * (2.0 if self.limit != self.limit else self.limit)

    def change(self) -> None:
        self.limit = 0.5


@case("e4")
class NameFromParts(Living):
    def __init__(self) -> None:
        super().__init__()
        self.level = 1
        self.layer1, self.layer2 = nn.Linear(12, 12), nn.Linear(12, 12)

    def middle(self, h: Tensor) -> Tensor:
        return getattr(self, f"layer{self.level}")(h)

    def change(self) -> None:
        self.level = 2


class Kind(abc.ABC):  # noqa: B024 - to register with
    pass


class OfNoKind:
    pass


@case("e4", breaks=True)
class RegisteredWithAnAbstractClass(Living):
    def __init__(self) -> None:
        super().__init__()
        self.thing = type("Thing", (OfNoKind,), {})()
        self.kind = type("OwnKind", (Kind,), {})

    def middle(self, h: Tensor) -> Tensor:
        return h * (2 if isinstance(self.thing, self.kind) else 3)

    def change(self) -> None:
        self.kind.register(type(self.thing))


@case("e4")
class MatchedByItsShape(Living):
    def __init__(self) -> None:
        super().__init__()
        self.order: Any = ("scale", 2.0)

    def middle(self, h: Tensor) -> Tensor:
        match self.order:
            case ("scale", gain):
                return h * gain
            case {"shift": shift}:
                return h + shift
            case _:
                return h

    def change(self) -> None:
        self.order = {"shift": 0.5}


@case("e4")
class GeneratorMethod(Living):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0, 0.5]

    def chosen(self) -> Iterator[float]:
        yield from (s for s in self.scales if s > 0)

    def middle(self, h: Tensor) -> Tensor:
        for scale in self.chosen():
            h = h + scale * torch.sin(h)
        return h

    def change(self) -> None:
        self.scales[:] = [-1.0, 0.25, 2.0]


@case("e4")
class DefaultThatFills(Living):
    """A list among the defaults is one list for all calls."""

    def __init__(self) -> None:
        super().__init__()

        def note(h: Tensor, seen: list[float] | None = None) -> Tensor:
            return h * (2.0 if not seen else seen[0])

        note.__defaults__ = ([],)
        self.note = note

    def middle(self, h: Tensor) -> Tensor:
        return self.note(h)

    def change(self) -> None:
        self.note.__defaults__[0].append(0.5)


@case("e4")
class ContextOfAnAttribute(Living):
    def __init__(self) -> None:
        super().__init__()
        self.context: Any = contextlib.nullcontext()

    def middle(self, h: Tensor) -> Tensor:
        with self.context:
            return self.first(h[:, :6]) * 2

    def change(self) -> None:
        self.context = torch.no_grad()


@case("e4")
class NamesOfAFunction(Living):
    def __init__(self) -> None:
        super().__init__()
        self.function: Any = torch.sin

    def middle(self, h: Tensor) -> Tensor:
        return self.function(h) * len(self.function.__name__)

    def change(self) -> None:
        self.function = torch.arctan


@case("e4", breaks=True)
class ProxyOfADict(Living):
    def __init__(self) -> None:
        super().__init__()
        self.table = {"gain": 2.0}
        self.view = types.MappingProxyType(self.table)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.view["gain"]

    def change(self) -> None:
        self.table["gain"] = 0.5
