"""Random data of the right kind for one call, so that the op can be run alone.

Values matter little for time, but an index must be in range, a variance positive, a mask must leave
something visible, and a seed is no random float. What kind an argument is follows from the op's
schema (argument names) and its other arguments. Data comes from a generator of its own: the user's
random streams are not touched.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.profile.op_signature import OpCall, TensorSpec, map_specs, packet_of

_POSITIVE = {"running_var", "save_invstd", "save_var", "var", "rstd", "invstd", "logsumexp", "std"}
_ZERO = {
    "philox_seed",
    "philox_offset",
    "rng_state",
    "unused",
    "attn_bias",
    "found_inf",
    "reserve",
    "reserveSpace",
}
_MASKS = {"attn_mask", "mask"}
_PROBABILITIES = {
    "aten.bernoulli",
    "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_backward",
    "aten.multinomial",
    "aten.poisson",
}
# Some inputs hold a library's own records, of which random bytes can crash the process. They are
# made by running the forward op: backward packet -> (forward op, {argument: forward output}).
_FROM_FORWARD: dict[str, tuple[str, dict[str, int]]] = {
    "aten.mkldnn_rnn_layer_backward": (
        "mkldnn_rnn_layer",
        {"output": 0, "hy_": 1, "cy_": 2, "workspace": 3},
    ),
    "rekindle.cudnn_rnn_backward": ("cudnn_rnn", {"output": 0, "reserve": -1}),
}
# The forward leaves the seed in host memory (outside of CUDA graphs), whatever fake tensors say;
# the backward reads it there: a seed on the GPU ends the process.
_SEED_ON_HOST = {
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._efficient_attention_backward",
}
_OTHER_NAMES = {"cx_": "cx_tmp", "weight0": "weight1", "weight1": "weight2"}
_OTHER_NAMES |= {"weight2": "weight3", "weight3": "weight4"}  # of one forward argument in backward


# Op packet -> (argument name that holds indices, how many values they may take).
_Limit = Callable[[dict[str, Any]], int]


def _along(tensor: str, dim: str = "dim") -> _Limit:
    return lambda given: given[tensor].shape[given[dim]] if given[tensor].shape else 1


def _rows(tensor: str) -> _Limit:
    return lambda given: given[tensor].shape[0]


def _classes(tensor: str) -> _Limit:
    """Scores are (classes) or (batch, classes, ...)."""
    return lambda given: given[tensor].shape[min(1, len(given[tensor].shape) - 1)]


def _plane(tensor: str, num_dims: int) -> _Limit:
    return lambda given: math.prod(given[tensor].shape[-num_dims:])


def _number(name: str) -> _Limit:
    return lambda given: int(given[name])


_INDICES: dict[str, tuple[str, _Limit]] = {
    "aten.embedding": ("indices", _rows("weight")),
    "aten.embedding_dense_backward": ("indices", _number("num_weights")),
    "aten.gather": ("index", _along("self")),
    "aten.gather_backward": ("index", _along("self")),
    "aten.scatter": ("index", _along("self")),
    "aten.scatter_": ("index", _along("self")),
    "aten.scatter_add": ("index", _along("self")),
    "aten.scatter_add_": ("index", _along("self")),
    "aten.scatter_reduce": ("index", _along("self")),
    "aten.index_select": ("index", _along("self")),
    "aten.index_add": ("index", _along("self")),
    "aten.index_add_": ("index", _along("self")),
    "aten.index_copy": ("index", _along("self")),
    "aten.index_fill": ("index", _along("self")),
    "aten.index_select_backward": ("index", lambda given: given["self_sizes"][given["dim"]]),
    "aten.take": ("index", lambda given: max(1, given["self"].numel)),
    "aten.nll_loss_forward": ("target", _classes("self")),
    "aten.nll_loss_backward": ("target", _classes("self")),
    "rekindle.nll_log_softmax_backward": ("target", _classes("log_probabilities")),
    "aten.nll_loss2d_forward": ("target", _classes("self")),
    "aten.nll_loss2d_backward": ("target", _classes("self")),
    "aten.multi_margin_loss": ("target", _classes("self")),
    "aten.multi_margin_loss_backward": ("target", _classes("self")),
    "aten.one_hot": ("self", lambda given: max(1, int(given.get("num_classes", 1)))),
    "aten.max_pool2d_with_indices_backward": ("indices", _plane("self", 2)),
    "aten.max_pool3d_with_indices_backward": ("indices", _plane("self", 3)),
    "aten.adaptive_max_pool2d_backward": ("indices", _plane("self", 2)),
    "aten.max_unpool2d": ("indices", lambda given: math.prod(given["output_size"])),
    "aten.value_selecting_reduction_backward": (
        "indices",
        lambda given: given["sizes"][given["dim"]] if given["sizes"] else 1,
    ),
}
_INDEX_LISTS = {
    "aten.index": "indices",
    "aten._unsafe_index": "indices",
    "aten.index_put": "indices",
    "aten.index_put_": "indices",
    "aten._unsafe_index_put": "indices",
}


def make_inputs(
    call: OpCall, device: torch.device, generator: torch.Generator
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the call with tensors that have its shapes, strides and sharing of storage."""
    roles = _roles(call)
    extents = _extents(call)
    storages: dict[int, torch.Tensor] = {}

    def build(spec: TensorSpec) -> torch.Tensor:
        start, count = extents[spec.alias]
        base = storages.get(spec.alias)
        if base is None:
            # A scalar that stays on the host beside an op on a GPU is made there.
            here = spec.device == device.type
            where = device if here else torch.device(spec.device)
            source = generator if here else torch.Generator(where).manual_seed(0)
            base = torch.empty(count, dtype=torch.uint8, device=where)
            typed = base[: count - count % spec.itemsize].view(spec.torch_dtype)
            _fill(typed, roles.get(id(spec), _Role()), source)
            storages[spec.alias] = base
        typed = base[: count - count % spec.itemsize].view(spec.torch_dtype)
        offset = spec.offset - start // spec.itemsize
        tensor = typed.as_strided(spec.shape, spec.stride, offset)
        role = roles.get(id(spec))
        if role is not None and role.visible and tensor.dim() > 0 and spec.dtype == "bool":
            tensor[..., 0] = True  # a row that masks everything has no softmax
        return tensor.conj() if "conj" in spec.lazy else tensor

    def on_device(arg: Any) -> Any:
        if isinstance(arg, torch.device):
            return device if arg.type == device.type else arg
        if isinstance(arg, torch.Generator):  # the user's: a measurement must not draw from it
            return torch.Generator(arg.device).manual_seed(0)
        if isinstance(arg, (tuple, list)):
            return type(arg)(on_device(a) for a in arg)
        return arg

    args = tuple(on_device(a) for a in map_specs(call.args, build))
    kwargs = {k: on_device(v) for k, v in map_specs(call.kwargs, build).items()}
    if packet_of(call) in _FROM_FORWARD:
        args = _with_forward_state(call, args)
    if packet_of(call) in _SEED_ON_HOST:
        args = _with_seed_on_host(call, args)
    return args, kwargs


def _with_seed_on_host(call: OpCall, args: tuple[Any, ...]) -> tuple[Any, ...]:
    names = [argument.name for argument in call.target._schema.arguments]  # type: ignore[attr-defined]
    return tuple(
        arg.cpu() if name in ("philox_seed", "philox_offset") else arg
        for name, arg in zip(names, args, strict=False)
    )


def _with_forward_state(call: OpCall, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a backward op with the records that its forward op makes of the others."""
    forward_name, made = _FROM_FORWARD[packet_of(call)]
    namespace = getattr(torch.ops, packet_of(call).partition(".")[0])
    forward = getattr(namespace, forward_name).default
    names = [argument.name for argument in call.target._schema.arguments]  # type: ignore[attr-defined]
    given = dict(zip(names, args, strict=False))
    rename = _OTHER_NAMES if forward_name == "mkldnn_rnn_layer" else {}
    outputs = forward(*(given[rename.get(a.name, a.name)] for a in forward._schema.arguments))
    return tuple(
        outputs[made[name]] if name in made else arg for name, arg in zip(names, args, strict=False)
    )


def input_bytes(call: OpCall) -> int:
    """What `make_inputs` allocates."""
    return sum(count for _, count in _extents(call).values())


@dataclass(frozen=True, slots=True)
class _Role:
    """What the values of an argument must be like."""

    limit: int = 2  # of integers, exclusive
    positive: bool = False
    zero: bool = False
    visible: bool = False  # a mask that hides no whole row
    unit: bool = False  # between 0 and 1


def _roles(call: OpCall) -> dict[int, _Role]:
    """By identity of the spec: what its values must be like."""
    given = _named_arguments(call)
    packet = packet_of(call)
    roles: dict[int, _Role] = {}
    for name, value in given.items():
        if isinstance(value, TensorSpec):
            roles[id(value)] = _Role(
                positive=name in _POSITIVE,
                zero=name in _ZERO,
                visible=name in _MASKS,
                unit=packet in _PROBABILITIES,
            )
    if packet in _INDICES:
        name, limit = _INDICES[packet]
        if isinstance(given.get(name), TensorSpec):
            roles[id(given[name])] = _Role(limit=max(1, limit(given)))
    if packet in _INDEX_LISTS:
        shape = given["self"].shape
        for dim, index in enumerate(given[_INDEX_LISTS[packet]]):
            if isinstance(index, TensorSpec):
                roles[id(index)] = _Role(limit=max(1, shape[dim]))
    if packet in ("aten.nll_loss_forward", "aten.nll_loss2d_forward") or "total_weight" in given:
        weight = given.get("total_weight")
        if isinstance(weight, TensorSpec):
            roles[id(weight)] = _Role(positive=True)
    return roles


def _named_arguments(call: OpCall) -> dict[str, Any]:
    """Arguments by the names of the op's schema, defaults filled in; {} for a plain function."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return {}
    given: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(call.args):
            given[argument.name] = call.args[position]
        elif argument.name in call.kwargs:
            given[argument.name] = call.kwargs[argument.name]
        elif argument.has_default_value():
            given[argument.name] = argument.default_value
    return given


def _extents(call: OpCall) -> dict[int, tuple[int, int]]:
    """Per storage: first byte that the call can touch (16-byte aligned as in the model) and how
    many from there; the rest of a larger storage is not allocated."""
    spans: dict[int, tuple[int, int]] = {}
    for spec in call.inputs:
        first = spec.offset * spec.itemsize
        reach = sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))
        last = first + (reach + 1) * spec.itemsize if spec.numel else first
        low, high = spans.get(spec.alias, (first, last))
        spans[spec.alias] = (min(low, first), max(high, last))
    result = {}
    for alias, (low, high) in spans.items():
        start = low - low % 512
        result[alias] = (start, -(-(high - start) // 16) * 16)
    return result


def _fill(flat: torch.Tensor, role: _Role, generator: torch.Generator) -> None:
    if flat.numel() == 0:
        return
    if role.zero:
        flat.zero_()
    elif flat.dtype == torch.bool:
        flat.copy_(_random_integers(flat, 2, generator).bool())
    elif flat.dtype.is_complex:
        torch.view_as_real(flat).uniform_(-1.0, 1.0, generator=generator)
    elif flat.dtype.is_floating_point:
        low, high = (0.5, 1.5) if role.positive else (0.1, 0.9) if role.unit else (-1.0, 1.0)
        if flat.dtype.itemsize == 1:  # float8 has no random fill of its own
            flat.view(torch.uint8).random_(0, 64, generator=generator)
        else:
            flat.uniform_(low, high, generator=generator)
    else:
        flat.copy_(_random_integers(flat, role.limit, generator))


def _random_integers(flat: torch.Tensor, limit: int, generator: torch.Generator) -> torch.Tensor:
    kind = torch.int64 if limit > 127 else torch.uint8
    return torch.randint(0, limit, flat.shape, dtype=kind, device=flat.device, generator=generator)
