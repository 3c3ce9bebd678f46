"""The backward of cross-entropy without its second copy of the logits.

Eager makes the gradient of the negative log-likelihood as a tensor of the logits' size that is zero
but for one element per row, and reads it once, for the gradient of log-softmax. With a large
vocabulary those tensors are the peak of the whole step. `rekindle::nll_log_softmax_backward` is the
two ops as one: the same two kernels on a few rows at a time. Each row's result depends on that row
alone, so the numbers are the same bit for bit; the sparse gradient exists for those rows only, and
the result may be written over the log-probabilities.
"""

import math
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts
from rekindle.rewrite.graph_edit import GraphEdit

aten = torch.ops.aten

_ROWS_BYTES = 64 << 20  # of the sparse gradient that exist at a time

_library = torch.library.Library("rekindle", "FRAGMENT")
_ARGUMENTS = (
    "Tensor grad_output, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction, "
    "int ignore_index, Tensor total_weight"
)
_library.define(f"nll_log_softmax_backward({_ARGUMENTS}) -> Tensor")
_library.define(f"nll_log_softmax_backward.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")


def _backward_over(
    grad_output: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    rows, columns = log_probabilities.shape
    at_once = max(1, min(rows, _ROWS_BYTES // max(1, columns * out.element_size())))
    parts = max(1, math.ceil(rows / at_once))
    at_once = math.ceil(rows / parts)  # about equal parts
    # Reused for each share; the kernel fills it with zeros itself.
    sparse = torch.empty_like(log_probabilities[:at_once])
    for first in range(0, rows, at_once):
        last = min(rows, first + at_once)
        mine = sparse[: last - first]
        inner = log_probabilities[first:last]
        aten.nll_loss_backward.grad_input(
            grad_output[first:last] if grad_output.dim() else grad_output,
            inner,
            target[first:last],
            weight,
            reduction,
            ignore_index,
            total_weight,
            grad_input=mine,
        )
        aten._log_softmax_backward_data.out(mine, inner, 1, inner.dtype, out=out[first:last])
    return out


def _backward_new(
    grad_output: torch.Tensor, log_probabilities: torch.Tensor, *rest: Any
) -> torch.Tensor:
    out = torch.empty_like(log_probabilities)
    return _backward_over(grad_output, log_probabilities, *rest, out=out)


_library.impl("nll_log_softmax_backward", _backward_new, "CompositeExplicitAutograd")
_library.impl("nll_log_softmax_backward.out", _backward_over, "CompositeExplicitAutograd")


torch.library.register_fake(
    "rekindle::nll_log_softmax_backward",
    lambda _grad, log_probabilities, *_rest: torch.empty_like(log_probabilities),
    lib=_library,
)

whole = torch.ops.rekindle.nll_log_softmax_backward.default
over = torch.ops.rekindle.nll_log_softmax_backward.out


def join_loss_gradients(edit: GraphEdit) -> None:
    """Turns each pair of ops that is the backward of a cross-entropy into the one op; the first of
    the pair is left without a reader."""
    for node in edit.backward:
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        sparse, log_probabilities, dim, dtype = node.args
        assert isinstance(sparse, fx.Node)
        assert isinstance(log_probabilities, fx.Node)
        # Someone else who reads the sparse gradient, such as a hook, needs it as a whole.
        if sparse.target is not aten.nll_loss_backward.default or list(sparse.users) != [node]:
            continue
        made, out = facts(log_probabilities).value, facts(node).value
        if (
            made.dim() == 2
            and dim in (1, -1)
            # A conversion inside the kernel would be another kernel.
            and dtype == made.dtype == out.dtype
            and made.is_contiguous()
            and out.is_contiguous()
            and facts(sparse.args[1]).storage == facts(log_probabilities).storage
        ):
            node.target = whole
            node.args = (sparse.args[0], log_probabilities, *sparse.args[2:])
