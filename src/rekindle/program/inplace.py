"""Where an op may write its result over an argument: the same kernel, told to put its output there.

Only kernels that are exact in place stand in `OVER`: those that read the element, or the row, that
they write and nothing else after writing it. `test_inplace` compares each of them bit for bit with
its ordinary form. Whether the argument really dies is the schedule's to say; where it does not, the
op runs as eager runs it.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import NodeFacts, facts
from rekindle.rewrite import cross_entropy
from rekindle.torch_compat import has_symbols, known_equal, storage_bytes

aten = torch.ops.aten

_ELEMENTWISE = (
    *("neg", "exp", "sigmoid", "silu", "tanh", "gelu", "rsqrt", "sqrt", "reciprocal", "sin", "cos"),
    *("erf", "log", "hardswish", "hardsigmoid", "clamp", "clamp_min", "leaky_relu", "elu"),
    *("softplus", "mish", "maximum", "minimum"),
)
_ELEMENTWISE_GRADIENTS = tuple(
    f"{name}_backward"
    for name in (
        *("gelu", "silu", "sigmoid", "tanh", "threshold", "elu", "leaky_relu", "hardtanh"),
        *("hardsigmoid", "softplus"),
    )
)

# Op -> the form of it that takes where to write, and the name of that argument.
OVER: dict[Any, tuple[Any, str]] = {
    **{getattr(aten, name).default: (getattr(aten, name).out, "out") for name in _ELEMENTWISE},
    **{
        getattr(aten, name).default: (getattr(aten, name).grad_input, "grad_input")
        for name in _ELEMENTWISE_GRADIENTS
    },
    **{
        getattr(aten, n).Tensor: (getattr(aten, n).out, "out") for n in ("add", "sub", "mul", "div")
    },
    aten.pow.Tensor_Scalar: (aten.pow.Tensor_Scalar_out, "out"),
    aten.where.self: (aten.where.self_out, "out"),
    aten._softmax.default: (aten._softmax.out, "out"),
    aten._log_softmax.default: (aten._log_softmax.out, "out"),
    aten._softmax_backward_data.default: (aten._softmax_backward_data.out, "grad_input"),
    aten._log_softmax_backward_data.default: (aten._log_softmax_backward_data.out, "out"),
    cross_entropy.whole: (cross_entropy.over, "out"),
}

# Eager's engine adds gradients up in place, whatever their size; the rest is worth a thought only
# where it frees a page.
_SMALL = 4096

# These work on rows: exact in place along the last dimension.
_ROWS = {aten._softmax.default: 1, aten._log_softmax.default: 1}
_ROWS |= {aten._softmax_backward_data.default: 2, aten._log_softmax_backward_data.default: 2}


@dataclass(frozen=True, slots=True)
class Over:
    """One argument that a call may write its result over, and the call that does so."""

    argument: fx.Node
    target: Any
    out_name: str


def candidates(node: fx.Node) -> Iterable[Over]:
    """The arguments of this call that its result fits over, in the order of the arguments."""
    found = OVER.get(node.target) or getattr(node.target, "over", None)
    if found is None:
        return
    made = facts(node).value
    if not isinstance(made, torch.Tensor):
        return
    if node.target in _ROWS and not _along_rows(made, node.args[_ROWS[node.target]]):
        return
    # Of several arguments over one storage none may be written over: the kernel would read what it
    # has written through the other.
    for argument in node.args:
        if not isinstance(argument, fx.Node):
            continue
        known = facts(argument)
        if _fits(known, node.target, made):
            others = [a for a in node.all_input_nodes if a is not argument]
            if not any(facts(a).storage == known.storage for a in others):
                yield Over(argument, *found)


def _along_rows(out: torch.Tensor, dim: Any) -> bool:
    assert isinstance(dim, int)
    return bool(dim % max(out.dim(), 1) == out.dim() - 1 and out.is_contiguous())


def _fits(argument: NodeFacts, target: Any, out: torch.Tensor) -> bool:
    """The same elements in the same places, and both the whole of their storages."""
    val, size = argument.value, argument.storage_bytes
    if not isinstance(val, torch.Tensor) or (val.dtype, val.dim()) != (out.dtype, out.dim()):
        return False
    # Bytes. A gradient sum is taken at any size, so that the peak is eager's. What is small at one
    # size of a call need not be at another.
    if type(size) is int and size < _SMALL and target is not aten.add.Tensor:
        return False
    changes = type(size) is not int or has_symbols(val) or has_symbols(out)
    same = known_equal if changes else operator.eq
    return bool(
        same(val.shape, out.shape)
        and same(val.stride(), out.stride())
        and same(val.numel() * val.element_size(), size)
        and same(size, storage_bytes(out))
    )
