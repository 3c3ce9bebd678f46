"""Sizes of a call that change, as symbols: which they are, where a call has them, for which of them
what was captured holds, and what a number that hangs on them is for given sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rekindle.capture.tensor_args import map_numbers
from rekindle.core.sizes import Conditions, expression
from rekindle.errors import CaptureError, InvalidProblem
from rekindle.torch_compat import (
    FakeTensor,
    GraphInput,
    NotASize,
    conditions_of,
    expression_key,
    free_symbols,
    has_symbols,
    hint_of,
    is_symbolic,
    num_guards,
    size_text,
    symbol_name,
)

number_key = expression_key  # equal for numbers that are equal for all sizes
Sizes = tuple[int, ...]  # of one call, as `ChangingSizes.names` counts them


@dataclass(frozen=True, slots=True)
class ChangingSizes:
    """The symbols of one capture."""

    symbols: Any  # torch's own
    names: tuple[str, ...]
    places: tuple[tuple[int, int], ...]  # per name: input of the call's graph, dimension
    traced: Sizes  # when the call was captured
    _functions: dict[Any, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def of_inputs(self, inputs: Sequence[Any]) -> Sizes:
        """The sizes of a call, out of what enters its graph."""
        return tuple([inputs[i].shape[d] for i, d in self.places])

    def at(self, sizes: Sizes) -> "SizesAt":
        """What numbers are for these sizes."""
        return SizesAt(self, sizes)

    @property
    def num_decisions(self) -> int:
        """How often something was decided by a size so far."""
        return num_guards(self.symbols)

    def conditions(self) -> Conditions:
        """For which sizes all that was decided so far is decided alike."""
        return Conditions(self.names, conditions_of(self.symbols, self.names))

    def function(self, number: Any) -> Callable[..., Any]:
        """The number as a function of the sizes."""
        key = expression_key(number)
        found = self._functions.get(key)
        if found is None:
            found = self._functions[key] = expression(self.names, size_text(number))
        return found


class SizesAt:
    """Numbers for given sizes; each is computed once."""

    __slots__ = ("_changing", "_known", "sizes")

    def __init__(self, changing: ChangingSizes, sizes: Sizes) -> None:
        self._changing = changing
        self._known: dict[Any, Any] = {}
        self.sizes = sizes

    def number(self, number: Any) -> Any:
        """What a number is."""
        if not is_symbolic(number):
            return number
        key = expression_key(number)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._changing.function(number)(*self.sizes)
        return found

    def numbers(self, nest: Any) -> Any:
        """The nest with its numbers as they are."""
        return map_numbers(self.number, nest)


def changing_sizes(symbols: Any, inputs: Sequence[GraphInput]) -> ChangingSizes:
    """The symbols of a call that was read. Each must be the size of an argument."""
    names: dict[str, tuple[int, int]] = {}
    traced: dict[str, int] = {}
    for i, given in enumerate(inputs):
        if not isinstance(given.stand_in, FakeTensor):
            continue
        for d, size in enumerate(given.stand_in.shape):
            name = symbol_name(size)
            if name is not None and name not in names:
                names[name] = (i, d)
                traced[name] = int(hint_of(size))
        unknown = {n for s in given.stand_in.stride() for n in free_symbols(s)} - names.keys()
        if unknown:
            raise NotASize(f"{given.expression} has strides that change by themselves")
    return ChangingSizes(symbols, tuple(names), tuple(names.values()), tuple(traced.values()))


def as_refusal(error: Exception) -> str:
    """Why sizes cannot change in one plan, for a person."""
    if isinstance(error, NotASize):
        return f"no plan covers more than one of them: {error}"
    if isinstance(error, InvalidProblem):
        return f"a number of the step cannot be written down: {error}"
    if isinstance(error, CaptureError):
        return str(error)
    line = next(iter(str(error).splitlines()), "")
    return f"torch cannot follow them ({type(error).__name__}: {line[:200]})"


def strides_key(stand_ins: Sequence[torch.Tensor], reals: Sequence[Any]) -> tuple[Any, ...]:
    """Equal for tensors that lie in memory in the same order, whatever their sizes."""
    pairs = zip(stand_ins, reals, strict=True)
    return tuple(
        [
            None if real is None else tuple(map(expression_key, stride_like(stand_in, real)))
            for stand_in, real in pairs
        ]
    )


def stride_like(stand_in: torch.Tensor, real: torch.Tensor) -> tuple[Any, ...]:
    """Strides for a stand-in, in the order in which a real tensor of its kind lies in memory: whole
    numbers, but for those that hang on sizes which change. Dimensions that are expanded stay so."""
    if not has_symbols(stand_in):
        return tuple(real.stride())
    found: list[Any] = [0] * real.dim()
    expected: Any = 1
    for d in sorted(range(real.dim()), key=lambda d: (real.stride(d), -d)):
        if real.stride(d) or real.size(d) == 1:
            found[d] = expected
            expected = expected * stand_in.size(d)
    return tuple(found)
