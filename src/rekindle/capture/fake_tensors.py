"""Fake tensors: what stands in for a real one, ops on them by a short way, and what code
that meets them sees.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rekindle.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    KeptAnswers,
    default_device,
    dispatch_with_symbols,
    expression_key,
    filling_stand_in,
    fresh_like,
    remade,
    run_below,
    storage_bytes,
)

aten = torch.ops.aten


def stand_in(mode: FakeTensorMode, real: torch.Tensor) -> FakeTensor:
    """What `mode.from_tensor` gives for a leaf. Most fill a storage of their own, and for those
    torch's converter, which is ready for anything, takes several times as long as the short way."""
    fake = filling_stand_in(mode, real) if _fills_storage(real) else None
    return mode.from_tensor(real, static_shapes=True) if fake is None else fake


def _fills_storage(real: torch.Tensor) -> bool:
    plain = type(real) in (torch.Tensor, nn.Parameter) and not hasattr(real, "_is_buffer")
    if not plain or real.layout is not torch.strided or real.is_quantized:
        return False
    if real._is_view() or real.is_conj() or real.is_neg() or real.is_inference():
        return False
    if not real.is_leaf or not real.is_contiguous() or real.storage_offset():
        return False
    if real.requires_grad and (
        real.grad is not None or getattr(real, "grad_dtype", real.dtype) != real.dtype
    ):
        return False
    return bool(real.untyped_storage().nbytes() == real.numel() * real.dtype.itemsize)


class FakeRuns:
    """Ops on the tensors of one fake mode, called while it is on.

    A call goes to the mode's own method where no other mode could take part: the dispatcher's way
    there costs as much again. torch keeps the answers of its fake kernels under a key that takes
    longer to write than the answer to make; a shorter one, valid for this mode, leads to them here.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._answers = KeptAnswers(mode)
        self._known: dict[Any, Any] = {}  # short key -> what torch keeps, or None
        # torch's own keys and answers cannot be told from here where they have symbols in them.
        self._with_symbols = mode.shape_env is not None

    def __call__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = run_below(self.mode, self._run, func, types, args, kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._with_symbols:
            return self._run_with_symbols(func, types, args, kwargs)
        if not self._answers.usable:
            return self.mode.dispatch(func, types, args, kwargs)
        if func is aten._unsafe_view.default:
            func = aten.view.default  # the same below autograd; torch keeps only this one
        key = self._key(func, args, kwargs)
        known = None if key is None else self._known.get(key, _MISSING)
        if known is None:
            return self.mode.dispatch(func, types, args, kwargs)
        if known is _MISSING:
            out, self._known[key] = self._answers.ask(func, types, args, kwargs)
            return out
        return self._answers.again(known, func, args)

    def _run_with_symbols(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        key = self._key(func, args, kwargs)
        known = None if key is None else self._known.get(key)
        if known is not None:
            return remade(self.mode, known)
        out = dispatch_with_symbols(self.mode, func, types, args, kwargs)
        if key is not None:
            self._known[key] = fresh_like(out, (args, kwargs))
        return out

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the mode's own key tells, shorter; None where it would keep nothing."""
        settings = (torch.get_default_dtype(), default_device(), torch.is_inference_mode_enabled())
        try:
            return (func, settings, self._part(args), self._part(kwargs))
        except _NoKey:
            return None

    def _part(self, arg: Any) -> Any:
        kind = type(arg)
        if kind is FakeTensor:
            if arg.fake_mode is not self.mode or arg.constant is not None:
                raise _NoKey
            if arg.layout is not torch.strided or arg.is_quantized:
                raise _NoKey
            sizes = (*arg.shape, *arg.stride(), arg.storage_offset(), storage_bytes(arg))
            if self._with_symbols:
                sizes = tuple([expression_key(n) for n in sizes])
            return (
                *(arg.dtype, arg.fake_device, arg.requires_grad, arg.is_conj(), arg.is_neg()),
                *(arg.is_inference(), *sizes),
            )
        if kind is tuple or kind is list:
            return (kind, *[self._part(a) for a in arg])
        if kind is dict:
            return (kind, *[(k, self._part(a)) for k, a in arg.items()])
        if kind is torch.SymInt and self._with_symbols:
            return (kind, expression_key(arg))
        if kind in _PLAIN:
            return (kind, arg)  # 1, 1.0 and True are equal to Python and not to an op
        raise _NoKey


class _NoKey(Exception):
    pass


_MISSING: Any = object()

_PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)


@contextlib.contextmanager
def fake_tensors_answer(numpy: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """`.numpy()` of a fake tensor is answered by this function inside."""

    def answer(self: torch.Tensor, *, force: bool = False) -> Any:
        return numpy(self.detach() if force else self)

    FakeTensor.numpy = answer
    try:
        yield
    finally:
        del FakeTensor.numpy
