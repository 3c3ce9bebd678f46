"""cuDNN's recurrent layers (nn.LSTM, nn.GRU, nn.RNN on CUDA) as two ops of our own: the forward and
the backward, each one call of cuDNN with eager's arguments.

torch describes neither without data: how much the forward keeps for the backward ("reserve") only
cuDNN knows, and the backward has no description at all. Here the real kernels are asked, once for
each kind of call, on blank tensors of the same layout. Two facts that torch's schema does not say
stand in ours: the backward writes into the reserve, and the gradients of the weights are views of
one block.

Left to the refusals in `effects`: packed sequences, autocast around the layer, and cuDNN's dropout
between layers, whose random state nothing outside can save or put back.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rekindle.capture import op_effects
from rekindle.capture.autocast import autocast_state
from rekindle.errors import CaptureError
from rekindle.torch_compat import outside_modes, pytree, storage_bytes, storage_key

aten = torch.ops.aten

# What runs for real; the tests put others in their place, since a CPU has no cuDNN.
forward_kernel: Callable[..., Any] = aten._cudnn_rnn.default
backward_kernel: Callable[..., Any] = aten._cudnn_rnn_backward.default
flatten_kernel: Callable[..., Any] = aten._cudnn_rnn_flatten_weight.default
is_acceptable: Callable[[torch.Tensor], bool] = torch.cudnn_is_acceptable

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # as cuDNN counts them

_library = torch.library.Library("rekindle", "FRAGMENT")
# `spec`: weights per layer and direction, mode, hidden size, projection size, layers,
# batch first, training, both directions.
_library.define(
    "cudnn_rnn(Tensor input, Tensor[] weight, Tensor hx, Tensor? cx, int[] spec) -> Tensor[]"
)
_library.define(
    "cudnn_rnn_backward(Tensor input, Tensor[] weight, Tensor hx, Tensor? cx, Tensor output, "
    "Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, Tensor(a!) reserve, int[] spec, "
    "bool[] mask) -> Tensor[]"
)


def run(name: str, original: Callable[..., Any], *args: Any) -> Any:
    """What `torch.lstm` and its kin do, during a capture."""
    packed = not isinstance(args[3], bool)
    if packed or not is_acceptable(args[0]):
        return original(*args)
    source, hidden, weight, has_bias, layers, dropout, train, both, batch_first = args
    if dropout and train:
        raise CaptureError(f"torch.{name}: {op_effects.RECURRENT_DROPOUT}")
    if autocast_state():
        raise CaptureError(f"torch.{name}: {op_effects.RECURRENT_FORMS}")
    hx, cx = hidden if name == "lstm" else (hidden, None)
    size, projected = int(hx.shape[2]), 0
    if cx is not None and cx.shape[2] != hx.shape[2]:
        size, projected = int(cx.shape[2]), int(hx.shape[2])
    stride = (4 if has_bias else 2) + bool(projected)
    spec = [stride, MODES[name], size, projected, layers, batch_first, train, both]
    return _Recurrent.apply([int(s) for s in spec], source, hx, cx, *weight)


class _Recurrent(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, spec: list[int], source: torch.Tensor, hx: torch.Tensor, cx: Any, *weight: Any
    ) -> tuple[torch.Tensor, ...]:
        made = torch.ops.rekindle.cudnn_rnn(source, list(weight), hx, cx, spec)
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(source, hx, cx, made[0], made[-1], *weight)
        return tuple(made[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        source, hx, cx, output, reserve, *weight = ctx.saved_tensors
        grad_output, grad_hy, grad_cy = (*grads, None)[:3]
        needs = ctx.needs_input_grad[1:]
        mask = [*needs[:2], needs[2] and cx is not None, any(needs[3:])]
        if not any(g is not None for g in (grad_output, grad_hy, grad_cy)):
            return (None,) * (4 + len(weight))
        made = iter(
            torch.ops.rekindle.cudnn_rnn_backward(
                source,
                weight,
                hx,
                cx,
                output,
                grad_output,
                grad_hy,
                grad_cy,
                reserve,
                ctx.spec,
                mask,
            )
        )
        first = [next(made) if wanted else None for wanted in mask[:3]]
        rest = list(made) if mask[3] else [None] * len(weight)
        return (None, *first, *rest)


# ---- the ops at run time


def _settings(spec: list[int]) -> tuple[Any, ...]:
    """The arguments of both kernels from `mode` to `dropout_state`."""
    _, mode, size, projected, layers, batch_first, train, both = spec
    dropout = 0.0
    lengths: list[int] = []  # of a packed sequence
    flags = bool(batch_first), dropout, bool(train), bool(both)
    return (mode, size, projected, layers, *flags, lengths, None)


def _forward(
    source: torch.Tensor, weight: Sequence[torch.Tensor], hx: torch.Tensor, cx: Any, spec: list[int]
) -> list[torch.Tensor]:
    block = _block(weight, spec)
    output, hy, cy, reserve, _ = forward_kernel(
        source,
        weight,
        spec[0],
        block,
        hx,
        cx,
        *_settings(spec),
    )
    return [output, hy, reserve] if cx is None else [output, hy, cy, reserve]


def _backward(
    source: torch.Tensor,
    weight: Sequence[torch.Tensor],
    hx: torch.Tensor,
    cx: Any,
    output: torch.Tensor,
    grad_output: Any,
    grad_hy: Any,
    grad_cy: Any,
    reserve: torch.Tensor,
    spec: list[int],
    mask: list[bool],
) -> list[torch.Tensor]:
    block = _block(weight, spec)
    if block is None:  # weights that lie apart: eager keeps the copy that its forward made
        block = _flattened(weight, spec)
    *first, rest = backward_kernel(
        source,
        weight,
        spec[0],
        block,
        hx,
        cx,
        output,
        grad_output,
        grad_hy,
        grad_cy,
        *_settings(spec),
        reserve,
        mask,
    )
    return [g for g, wanted in zip(first, mask[:3], strict=True) if wanted] + (
        list(rest) if mask[3] else []
    )


_library.impl("cudnn_rnn", _forward, "CompositeExplicitAutograd")
_library.impl("cudnn_rnn_backward", _backward, "CompositeExplicitAutograd")


# ---- the weights as one block

_places: dict[Any, tuple[tuple[int, ...], int]] = {}  # where each weight lies in a block, its size


def _block(weight: Sequence[torch.Tensor], spec: list[int]) -> torch.Tensor | None:
    """The one block that the weights are parts of, in cuDNN's order; None where they are not, and
    each call has to copy them together, as in eager."""
    storage = weight[0].untyped_storage()
    address = storage.data_ptr()
    if any(w.untyped_storage().data_ptr() != address for w in weight[1:]):
        return None
    key = (weight[0].dtype, *spec, *(w.shape for w in weight))
    if key not in _places:
        blanks = [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in weight]
        block = _flatten(blanks, spec)
        _places[key] = tuple(w.storage_offset() for w in blanks), block.numel()
    offsets, size = _places[key]
    if tuple([w.storage_offset() for w in weight]) != offsets:
        return None
    if not weight[-1].is_contiguous() or storage.nbytes() < size * weight[0].element_size():
        return None
    return weight[0].detach().as_strided((size,), (1,), 0)


def _flattened(weight: Sequence[torch.Tensor], spec: list[int]) -> torch.Tensor:
    return _flatten([w.detach().clone() for w in weight], spec)


def _flatten(weight: list[torch.Tensor], spec: list[int]) -> torch.Tensor:
    """Moves the weights into one block, and gives it."""
    stride, mode, size, projected, layers, batch_first, _, both = spec
    width = int(weight[0].shape[1])
    with torch.no_grad():
        block: torch.Tensor = flatten_kernel(
            weight, stride, width, mode, size, projected, layers, bool(batch_first), bool(both)
        )
    return block


# ---- what they give, without data

_answers: dict[Any, list[tuple[Any, ...]]] = {}


def _described(kernel: Callable[..., list[torch.Tensor]], *args: Any) -> list[torch.Tensor]:
    """Fake tensors, laid out as the kernel's real results."""
    leaves = pytree.tree_leaves(args)
    flat = _share_storage(args[1])
    kinds = tuple(_kind(a) if isinstance(a, torch.Tensor) else a for a in leaves)
    key = (kernel, flat, str(pytree.tree_structure(args)), kinds)
    if key not in _answers:
        with outside_modes(), torch.no_grad():
            blanks = list(pytree.tree_map_only(torch.Tensor, _blank, args))
            spec = args[4] if kernel is _forward else args[9]
            blanks[1] = [torch.zeros(w.shape, dtype=w.dtype, device=w.device) for w in args[1]]
            if flat:
                _flatten(blanks[1], spec)
            if kernel is _backward:  # a reserve that no forward has filled could crash the kernel
                source, weight, hx, cx = blanks[:4]
                made = _forward(source, weight, hx, cx, spec)
                blanks[4], blanks[8] = made[0], made[-1]
            _answers[key] = _layouts(kernel(*blanks))
    rooms: dict[int, torch.Tensor] = {}
    found = []
    for shape, stride, offset, dtype, number, size in _answers[key]:
        if number not in rooms:
            rooms[number] = args[0].new_empty(size // dtype.itemsize, dtype=dtype)
        found.append(rooms[number].as_strided(shape, stride, offset))
    return found


def _layouts(made: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    numbers: dict[int, int] = {}
    return [
        (
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
            numbers.setdefault(storage_key(t), len(numbers)),
            storage_bytes(t),
        )
        for t in made
    ]


def _share_storage(weight: Sequence[torch.Tensor]) -> bool:
    return len({storage_key(w) for w in weight}) == 1


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(t.shape), t.stride(), t.dtype, str(t.device))


def _blank(t: torch.Tensor) -> torch.Tensor:
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    room = torch.zeros(span if t.numel() else 0, dtype=t.dtype, device=t.device)
    return room.as_strided(t.shape, t.stride())


def _fake_forward(*args: Any) -> list[torch.Tensor]:
    return _described(_forward, *args)


def _fake_backward(*args: Any) -> list[torch.Tensor]:
    return _described(_backward, *args)


torch.library.register_fake("rekindle::cudnn_rnn", _fake_forward, lib=_library)
torch.library.register_fake("rekindle::cudnn_rnn_backward", _fake_backward, lib=_library)
