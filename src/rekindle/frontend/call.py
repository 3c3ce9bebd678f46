"""A call of a model, read by Dynamo: guards decide later which calls are like it, its torch calls
become a graph, and what it does to Python objects is replayed.

The model hears that it is not being compiled, so it takes eager's branches. What Dynamo cannot read
in one piece is refused by name.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.errors import CaptureError
from rekindle.frontend.words import reason
from rekindle.torch_compat import (
    Ask,
    GraphBreak,
    Reading,
    Returned,
    answering,
    outside_modes,
)
from rekindle.torch_compat import read_call as _read_call

__all__ = [
    "LOSS_ARGS",
    "Ask",
    "Call",
    "Marks",
    "Reading",
    "as_loss_args",
    "call_of",
    "raised_while_read",
    "read",
]

Marks = Sequence[tuple[torch.Tensor, Sequence[int]]]  # arguments, and which of their sizes change

_READ = "_rekindle_read"  # marks what the model raised while it was read, and has not done since
LOSS_ARGS = "loss_args"  # keyword of a managed call: what `loss_fn` gets besides the output


@dataclass(frozen=True, slots=True)
class Call:
    """What is called, and with what: the scope that guards are about."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None = None
    loss_args: tuple[Any, ...] = ()

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of the managed call."""
        given = {LOSS_ARGS: self.loss_args} if self.loss_args else {}
        return {**self.kwargs, **given}

    @property
    def scope(self) -> dict[str, Any]:
        """What guards are about: the expressions of their sources begin with these names."""
        return {
            "forward": self.forward,
            "args": self.args,
            "kwargs": self.kwargs,
            "loss_fn": self.loss_fn,
            "loss_args": self.loss_args,
        }

    def eager(self) -> Any:
        """What the call returns without a plan."""
        out = self.forward(*self.args, **self.kwargs)
        return out if self.loss_fn is None else self.loss_fn(out, *self.loss_args)


def call_of(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
) -> Call:
    """The call that a managed module makes of its arguments."""
    kwargs = dict(keywords)
    if loss_fn is None:
        return Call(forward, args, kwargs)
    return Call(forward, args, kwargs, loss_fn, as_loss_args(kwargs.pop(LOSS_ARGS, ())))


def as_loss_args(given: Any) -> tuple[Any, ...]:
    """What was given for `loss_args`, as the loss gets it."""
    if isinstance(given, torch.Tensor):
        raise TypeError("loss_args is a tensor; expected a tuple, such as loss_args=(target,)")
    return tuple(given)


def read(
    call: Call, ask: Ask, module_hooks: Callable[..., Any], marks: Marks = ()
) -> tuple[Reading, Returned]:
    """The call as Dynamo reads it, and what it returns. `ask` answers questions to the data,
    `module_hooks` makes what stands in the graph for backward hooks of modules."""
    returned = Returned()
    adapt = functools.partial(answering, ask, _show, returned, module_hooks)
    entry = _call if call.loss_fn is None else _call_with_loss
    with _refusals(), outside_modes():
        reading = _read_call(entry, call.scope, adapt, marks)
    return reading, returned


def raised_while_read(error: Exception) -> bool:
    """Whether the model itself raises this, and did so while it was read: nothing has run, so what
    eager does before it raises (draws, counters, statistics) is still to be done. Asked once."""
    return bool(vars(error).pop(_READ, False))


def _call(forward: Any, args: Any, kwargs: Any, loss_fn: Any, loss_args: Any, repeated: Any) -> Any:
    out = forward(*args, **kwargs)
    _show(out)
    return out


def _call_with_loss(
    forward: Any, args: Any, kwargs: Any, loss_fn: Any, loss_args: Any, repeated: Any
) -> Any:
    out = loss_fn(forward(*args, **kwargs), *loss_args)
    _show(out)
    return out


def _show(_out: Any) -> None:
    """Known to `answering`: what a call returns."""


@contextlib.contextmanager
def _refusals() -> Any:
    try:
        yield
    except GraphBreak as broken:
        if isinstance(broken.original, CaptureError):
            raise broken.original from None
        if broken.is_the_models:
            with contextlib.suppress(AttributeError):  # of a class with slots
                setattr(broken.original, _READ, True)
            raise broken.original from None
        at = f" at {broken.line}" if broken.line else ""
        raise CaptureError(
            f"the model's code cannot be read in one piece: {reason(broken.why)}{at}; manage the "
            "submodules around it one by one"
        ) from broken
