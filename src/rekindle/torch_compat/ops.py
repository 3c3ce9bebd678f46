"""Kinds of ops, and ways to call them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

nn_functions = torch._C._nn  # ops that Python binds in a place of their own, such as gelu
_RECURRENT = {getattr(torch._VF, name): name for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}


def as_modules_call(function: Any) -> Any:
    """A function of recurrent layers where modules find it, which may be another for a while."""
    return getattr(torch._VF, _RECURRENT.get(function, ""), function)


def is_overload(target: object) -> bool:
    """Whether it is an ATen or custom op, with one signature."""
    return isinstance(target, torch._ops.OpOverload)


def is_higher_order(target: object) -> bool:
    """Whether it is an op that takes functions, such as `flex_attention`."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def copy_all(into: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copies each into its place, many by one launch."""
    torch._foreach_copy_(list(into), list(tensors))


@functools.cache
def bare_call(target: Any) -> Any:
    """The overload without its Python wrapper, under a name that FX can print."""
    # `_op` is the builtin that the overload wraps: 2.0 against 2.6 us a call on a small product.
    return named_call(target._op, str(target).replace(".", "_").replace("::", "_"))


def named_call(function: Callable[..., Any], name: str) -> Any:
    """A callable under a name that FX can print."""
    call = functools.partial(function)
    call.__name__ = call.__qualname__ = name  # type: ignore[attr-defined]
    call.__module__ = __package__  # part of the name under which measurements are kept
    return call
