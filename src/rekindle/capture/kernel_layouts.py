"""The layouts that real kernels choose, where the kernels for fake tensors choose others.

Strides decide what runs next: a gradient that is not contiguous is cloned before it can be viewed,
a norm asks for the memory format. A capture that believes a wrong layout takes another path than
eager. The fake kernels of torch 2.11 to 2.15 are wrong for some dozens of ops once their arguments
lie in memory in mixed ways (layer_norm's backward, roll, hardswish's backward, ...), for dimensions
of size 1, and for the workspace of the CPU's recurrent layers. There the real kernel is asked,
once for each kind of call, on blank tensors of the same layout.
"""

import functools
import math
from typing import Any, Literal

import torch

from rekindle.capture import op_effects
from rekindle.capture.tensor_args import map_numbers, tensors_of
from rekindle.torch_compat import (
    NotASize,
    has_symbols,
    hint_of,
    is_overload,
    outside_modes,
    pytree,
    storage_bytes,
    storage_key,
)

aten = torch.ops.aten

# Compared with the real kernels over mixed layouts and found right (`test_layouts` repeats the
# comparison): they are frequent, and need not be asked.
SURE = frozenset(
    {
        "_adaptive_avg_pool2d",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_softmax",
        "_softmax_backward_data",
        "_to_copy",
        "_unsafe_view",
        "abs",
        "add",
        "addmm",
        "amax",
        "baddbmm",
        "bmm",
        "cat",
        "clone",
        "convolution",
        "convolution_backward",
        "copy_",
        "cos",
        "cumsum",
        "div",
        "embedding",
        "empty_like",
        "eq",
        "erf",
        "exp",
        "expand",
        "fill_",
        "ge",
        "gelu",
        "gelu_backward",
        "gt",
        "le",
        "lt",
        "masked_fill",
        "max_pool2d_with_indices",
        "mean",
        "mm",
        "mul",
        "native_dropout",
        "native_dropout_backward",
        "native_group_norm",
        "native_layer_norm",
        "neg",
        "new_empty",
        "new_empty_strided",
        "new_zeros",
        "ones_like",
        "pow",
        "relu",
        "rsqrt",
        "rsub",
        "scalar_tensor",
        "select_backward",
        "sigmoid",
        "sigmoid_backward",
        "silu",
        "silu_backward",
        "sin",
        "slice_backward",
        "sqrt",
        "stack",
        "sub",
        "sum",
        "tanh",
        "tanh_backward",
        "threshold_backward",
        "where",
        "zeros_like",
    }
)

# Another shape, size or layout than the fake kernel says, whatever the layout of the arguments. How
# transforms lay out their result depends on the library that this torch was built with.
_ALWAYS = frozenset({"mkldnn_rnn_layer", "_fft_r2c", "_fft_c2r", "_fft_c2c"})

# The fake kernel gives one tensor twice where the real one gives two.
_TWICE = frozenset({aten.mkldnn_rnn_layer_backward.default})


Trust = Literal["whole", "view", "twice", "none", "dense", "free"]


@functools.cache
def _trust(func: Any) -> Trust:
    """How far the fake kernel of this op is relied on: "whole", "none", where its arguments are
    "dense", or (of "free" strides) where none that is not dense has a dimension of size 1."""
    if not is_overload(func) or func.namespace != "aten" or op_effects.is_random(func):
        return "whole"
    if func in (aten.view.default, aten._unsafe_view.default):
        return "view"
    if func in _TWICE:
        return "twice"
    name = func._schema.name.partition("::")[2]
    if name in _ALWAYS:
        return "none"
    if name in SURE or name.endswith("_"):
        # Strides of dimensions of size 1 are free; elementwise kernels keep or drop them.
        return "free" if torch.Tag.pointwise in func.tags else "whole"
    return "dense"


def _doubtful(trust: Trust, tensors: list[torch.Tensor]) -> bool:
    mixed = [t for t in tensors if t.dim() > 1 and not t.is_contiguous()]
    return any(1 in t.shape for t in mixed) if trust == "free" else bool(mixed)


class Layouts:
    """What real kernels answered, by kind of call."""

    def __init__(self) -> None:
        self._answers: dict[Any, list[tuple[Any, ...]] | None] = {}

    def correct(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """`out` of the fake kernel, with each new tensor laid out as the real kernel would."""
        trust = _trust(func)
        if trust == "whole":
            return out
        if trust == "view":
            return self._view(args, out)
        if trust == "twice":
            return _distinct(out)
        tensors = tensors_of((args, kwargs))
        if trust != "none" and not _doubtful(trust, tensors):
            return out
        old = {storage_key(t) for t in tensors}
        fresh = [
            isinstance(leaf, torch.Tensor) and storage_key(leaf) not in old
            for leaf in pytree.tree_leaves(out)
        ]
        if not any(fresh):
            return out
        if any(map(has_symbols, tensors)):
            return self._sure(func, args, kwargs, out)
        answer = self._ask(func, args, kwargs)
        if answer is None or len(answer) != len(fresh):
            return out
        flat, spec = pytree.tree_flatten(out)
        for i, (leaf, new) in enumerate(zip(flat, fresh, strict=True)):
            if new:
                flat[i] = _laid_out(leaf, answer[i])
        return pytree.tree_unflatten(flat, spec)

    def _view(self, args: Any, out: torch.Tensor) -> torch.Tensor:
        """A view of something with dimensions of size 1: the meta kernel is the real one."""
        if 1 not in out.shape or out.dim() < 2:
            return out
        shape = tuple(map(hint_of, out.shape))
        with outside_modes():
            stride = _blank(args[0], torch.device("meta")).view(shape).stride()
        if stride == tuple(map(hint_of, out.stride())):
            return out
        if has_symbols(out):
            raise NotASize("the strides of a view")
        return aten.as_strided.default(out, out.shape, stride, out.storage_offset())

    def _sure(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """`out`, of sizes that change, where the real kernel agrees for the sizes of the call that
        is captured: what it answers holds for those alone."""
        answer = self._ask(func, *map_numbers(hint_of, (args, kwargs)))
        leaves = pytree.tree_leaves(out)
        same = answer is None or len(answer) != len(leaves)
        if same or answer == [_description(leaf) for leaf in leaves]:
            return out
        raise NotASize(f"the layout of what {func} makes")

    def _ask(self, func: Any, args: Any, kwargs: Any) -> list[tuple[Any, ...]] | None:
        """Shape, strides, dtype and bytes of each output of the real kernel; None where it cannot
        say on tensors without contents."""
        key = (func, repr(pytree.tree_map_only(torch.Tensor, _kind, (args, kwargs))))
        if key not in self._answers:
            try:
                # In the grad mode of the moment: recurrent layers keep less without gradients.
                with outside_modes():
                    like = pytree.tree_map_only(
                        torch.Tensor, lambda t: _blank(t, t.device), (args, kwargs)
                    )
                    real = func(*like[0], **like[1])
                    self._answers[key] = [_description(x) for x in pytree.tree_leaves(real)]
            except (RuntimeError, NotImplementedError, IndexError):
                self._answers[key] = None
        return self._answers[key]


def _distinct(out: Any) -> Any:
    flat, spec = pytree.tree_flatten(out)
    seen: set[int] = set()
    for i, leaf in enumerate(flat):
        if id(leaf) in seen:
            flat[i] = torch.empty_like(leaf)
        seen.add(id(leaf))
    return pytree.tree_unflatten(flat, spec)


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return (*_traced(t), t.dtype, t.device)


def _traced(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in the call that is captured."""
    return tuple(map(hint_of, t.shape)), tuple(map(hint_of, t.stride()))


def _description(x: Any) -> tuple[Any, ...]:
    if not isinstance(x, torch.Tensor):
        return ()
    return (*_traced(x), x.dtype, hint_of(storage_bytes(x)))


def _laid_out(fake: torch.Tensor, answer: tuple[Any, ...]) -> torch.Tensor:
    if not answer or answer == _description(fake):
        return fake
    shape, stride, dtype, size = answer
    room = torch.empty(size // dtype.itemsize, dtype=dtype, device=fake.device)
    return aten.as_strided.default(room, shape, stride, 0)


def _blank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros in the same layout; zeros are indices that every table has."""
    shape, stride = _traced(tensor)
    span = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
    room = torch.zeros(span if math.prod(shape) else 0, dtype=tensor.dtype, device=device)
    return room.as_strided(shape, stride)
