"""The recorded graph of a call, before any rewrite."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from rekindle.capture import JointGraph
from rekindle.pipeline import recorded
from rekindle.plans.options import Options


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
) -> JointGraph:
    return recorded(Options(loss_fn=loss_fn), model, args, kwargs or {})[0]
