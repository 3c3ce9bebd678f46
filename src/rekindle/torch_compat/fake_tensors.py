"""Fake tensors, which have no data: how they are made, and the answers that their mode keeps."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    _BypassDispatchCache,
    _CacheKeyState,
)
from torch.utils import _pytree as pytree

from rekindle.torch_compat.storages import storage_key
from rekindle.torch_compat.symbols import expression_key

__all__ = [  # torch's own, handed on as they are
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
]

UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)


def new_fake_mode(symbols: Any = None) -> FakeTensorMode:
    """A mode whose tensors refuse to tell an address instead of telling a wrong one. `symbols`: of
    their sizes, where some change."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols)
    # By default who asks gets an address of nothing, and a warning of deprecation.
    mode._allow_unsafe_data_ptr_access = False
    return mode


def filling_stand_in(mode: FakeTensorMode, real: torch.Tensor) -> FakeTensor | None:
    """What `mode.from_tensor` gives for a plain leaf that fills its storage, in a fraction of the
    time; None where another tensor of that storage came before."""
    converter = mode.fake_tensor_converter
    memo = converter.meta_converter.storage_memo
    storage_id = converter.meta_converter.describer.get_storage_id(real.untyped_storage())
    if storage_id in memo:
        return None
    # What the meta converter does for such a tensor, without its checks for views and subclasses.
    with torch._C._DisableTorchDispatch():
        blank = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        fake = FakeTensor(mode, blank, real.device)
    fake.requires_grad = real.requires_grad
    if isinstance(real, torch.nn.Parameter):
        fake._is_param = True
    # The converter's own memory: a view of the same storage that comes later must find this one.
    memo[storage_id] = fake.untyped_storage()
    converter.set_tensor_memo(real, fake)
    return fake


# ---- kernels for fake tensors that refuse what eager runs


class _Asking(threading.local):
    """Whether this thread captures; other users of fake tensors get torch's own answers."""

    num = 0


_asking = _Asking()


@contextlib.contextmanager
def eager_layouts_answered() -> Iterator[None]:
    """Inside, fake tensors have eager's answer where torch's kernel for them has another."""
    _asking.num += 1
    try:
        yield
    finally:
        _asking.num -= 1


def _grouped_mm(
    mode: FakeTensorMode,
    _op: Any,
    a: Any,
    b: Any,
    offs: Any = None,
    bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Eager multiplies float32 and float16 too; torch's kernel for fake tensors (2.11 to 2.15)
    knows bfloat16 alone. Rows are padded to 16 bytes as in eager, which torch's kernel leaves out
    in a build without CUDA. What eager refuses is left to eager to refuse."""
    if not _asking.num or torch.version.hip:
        return NotImplemented
    dtype = out_dtype or a.dtype
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():  # a product for each group
        shape.insert(0, a.shape[0] if a.dim() == 3 else offs.shape[0])
    columns = 16 // dtype.itemsize
    width = -(-shape[-1] // columns) * columns
    stride = [shape[-2] * width, width, 1][-len(shape) :]
    with mode:
        return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_mm)

_FAKE = torch._C._TorchDispatchModeKey.FAKE
DEVICE_OF = torch.ops.prim.device.default  # the engine asks for it several times per op
default_device = torch._C._get_default_device


def run_below(mode: FakeTensorMode, run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args)` with the mode off, as the dispatcher calls a mode, where it is the only one that
    is on; NotImplemented elsewhere."""
    found = torch._C._unset_dispatch_mode(_FAKE)
    try:
        if found is mode and not torch._C._len_torch_dispatch_stack():
            return run(*args)
        return NotImplemented
    finally:
        if found is not None:
            torch._C._set_dispatch_mode(found)


class KeptAnswers:
    """What a fake mode keeps of the answers of its kernels: told by `ask`, given by `again`."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        told = _told_of_an_answer()
        self.usable = mode.cache_enabled and not mode.cache_crosscheck_enabled and told is not None
        self._with_op = told is not None and "func" in told
        self._state = _CacheKeyState(None)  # without symbols there is nothing in it

    def ask(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The answer of the mode; and what it keeps of it, or None."""
        try:
            # The key is made a second time inside `dispatch`; only so is it known here, for
            # `again`.
            key = self.mode._cache_key(_CacheKeyState(None), func, args, kwargs)
        except _BypassDispatchCache:
            key = None
        out = self.mode.dispatch(func, types, args, kwargs)
        entry = None if key is None else FakeTensorMode.cache.get(key)
        return out, (entry, key, _fresh(entry)) if hasattr(entry, "output_infos") else None

    def again(self, kept: Any, func: Any, args: tuple[Any, ...]) -> Any:
        """The answer once more, for arguments of the same kind."""
        entry, key, fresh = kept
        if fresh is None:
            told = (key, func, args) if self._with_op else (key, args)
            return self.mode._output_from_cache_entry(self._state, entry, *told)
        made = [
            m
            and FakeTensor(
                self.mode,
                torch.empty_strided(
                    m.shape, m.stride, dtype=m.dtype, device="meta", requires_grad=m.requires_grad
                ),
                m.device,
            )
            for m in fresh
        ]
        return tuple(made) if entry.is_output_tuple else made[0]


def dispatch_with_symbols(
    mode: FakeTensorMode, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The answer of the mode. Some kernels of C++ know no symbols, and those of Python do."""
    with enable_python_dispatcher():
        return mode.dispatch(func, types, args, kwargs)


def fresh_like(out: Any, given: Any) -> list[Any] | None:
    """What describes each output of an op on fake tensors, where all of them are new tensors, each
    with a storage of its own that it fills from the start."""
    known = {storage_key(t) for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)}
    found = []
    for tensor in out if isinstance(out, (tuple, list)) else (out,):
        if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
            return None
        if storage_key(tensor) in known or tensor.is_conj() or tensor.is_neg():
            return None
        if expression_key(tensor.storage_offset()) != 0 or tensor.constant is not None:
            return None
        known.add(storage_key(tensor))
        found.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device))
    # torch's own kinds of tuples are read by position.
    kind = list if isinstance(out, list) else tuple if isinstance(out, tuple) else None
    return [kind, *found]


def remade(mode: FakeTensorMode, described: list[Any]) -> Any:
    """New tensors as `fresh_like` has described them."""
    kind, *tensors = described
    made = [
        FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
        for shape, stride, dtype, device in tensors
    ]
    return kind(made) if kind else made[0]


def _fresh(entry: Any) -> list[Any] | None:
    """What describes each output, None for one that is None, where all of them are new tensors:
    those are made here, without the guards that torch puts around the making of each."""
    found = []
    for info in entry.output_infos:
        m = info.metadata
        if info.inplace_idx is not None or info.view_idx is not None:
            return None
        if m is None:
            if not hasattr(info, "constant_value") or info.constant_value is not None:
                return None
        elif m.layout is not torch.strided or m.is_conj or m.is_neg:
            return None
        found.append(m)
    return found


_CACHE_KEY = ("self", "state", "func", "args", "kwargs")
_TOLD = (
    ("self", "state", "entry", "key", "func", "args"),  # torch 2.11 to 2.14
    ("self", "state", "entry", "key", "args"),  # since 2.15
)


@functools.cache
def _told_of_an_answer() -> tuple[str, ...] | None:
    """The parameters of torch's function that repeats an answer; None where this release keeps
    answers in a form that is not known here."""
    key = _parameters("_cache_key")
    told = _parameters("_output_from_cache_entry")
    kept = isinstance(getattr(FakeTensorMode, "cache", None), dict)
    return told if kept and key == _CACHE_KEY and told in _TOLD else None


def _parameters(name: str) -> tuple[str, ...]:
    method = getattr(FakeTensorMode, name, None)
    return () if method is None else tuple(inspect.signature(method).parameters)
