"""A call of a model, read by Dynamo: guards decide later which calls are like it, its torch calls
become a graph, and what it does to Python objects is replayed.

The model hears that it is not being compiled, so it takes eager's branches. What Dynamo cannot read
in one piece is refused by name.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import CaptureError
from rekindle.frontend.words import reason
from rekindle.torch_compat import (
    Ask,
    GraphBreak,
    GraphInput,
    Reading,
    Returned,
    answering,
    outside_modes,
)
from rekindle.torch_compat import read_call as _read_call

__all__ = ["Ask", "Call", "GraphInput", "Reading", "read"]


@dataclass(frozen=True, slots=True)
class Call:
    """What is called, and with what: the scope that guards are about."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss_fn: Callable[..., Any] | None = None

    @property
    def scope(self) -> dict[str, Any]:
        return {
            "forward": self.forward,
            "args": self.args,
            "kwargs": self.kwargs,
            "loss_fn": self.loss_fn,
        }


def read(call: Call, ask: Ask) -> tuple[Reading, Returned]:
    """The call as Dynamo reads it, and what it returns. `ask` answers questions to the data."""
    returned = Returned()
    adapt = functools.partial(answering, ask, _show, returned)
    entry = _call if call.loss_fn is None else _call_with_loss
    with _refusals(), outside_modes():
        reading = _read_call(entry, call.scope, adapt)
    return reading, returned


def _call(forward: Any, args: Any, kwargs: Any, loss_fn: Any) -> Any:
    out = forward(*args, **kwargs)
    _show(out)
    return out


def _call_with_loss(forward: Any, args: Any, kwargs: Any, loss_fn: Any) -> Any:
    out = loss_fn(forward(*args, **kwargs))
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
            raise broken.original from None
        at = f" at {broken.line}" if broken.line else ""
        raise CaptureError(
            f"the model's code cannot be read in one piece: {reason(broken.why)}{at}; manage the "
            "submodules around it one by one"
        ) from broken
