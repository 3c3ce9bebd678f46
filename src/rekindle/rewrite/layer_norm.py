"""Layer norm in one pass, with the sum before it, and its backward with the sum behind it.

torch's kernels give a row to four warps, which read it twice and wait for each other; where rows
are short most of their threads are idle. Here a warp has a row, and keeps it. A residual sum is
written and read again by the layer norm that follows; on the way back the gradient of a norm's
input is written and read again by the sum with the gradient that passed the block by: here each
pair is one kernel.

The bits are torch's: the sums are made in the order of torch's kernels
(`kernels.layer_norm_source`). Whether they are is tried on each device, for each dtype and length
of a row, before a kernel is used.
"""

import operator
import struct
from collections.abc import Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts, set_facts
from rekindle.rewrite.exactness import same_numbers, tried_once
from rekindle.rewrite.graph_edit import GraphEdit
from rekindle.rewrite.kernels.layer_norm_source import (
    FEWEST_ROWS,
    LONGEST,
    MOST_ROWS,
    ROWS,
    VECTOR,
    kernel,
)

aten = torch.ops.aten


def _bits(x: float) -> int:
    return int(struct.unpack("I", struct.pack("f", x))[0])


def _aligned(*tensors: torch.Tensor) -> bool:
    """A kernel reads vectors."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bool(bits % (VECTOR * tensors[0].element_size()) == 0)


# --- forward ------------------------------------------------------------------------------------

_library = torch.library.Library("rekindle", "FRAGMENT")
_library.define(
    "layer_norm(Tensor x, int[] shape, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor, Tensor, Tensor)"
)


def _layer_norm(
    x: torch.Tensor, shape: list[int], weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    if not x.is_cuda or not _aligned(x, weight, bias):
        made: tuple[torch.Tensor, ...] = aten.native_layer_norm.default(x, shape, weight, bias, eps)
        return made
    return _normed(x, x, weight, bias, eps, x)


def _normed(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    total: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """By the kernel: of `x`, or where `total` is not that, of the sum, which is written there."""
    normed = torch.empty_like(x)
    mean = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    tensors = (x, y, weight, bias, total, normed, mean, rstd)
    launch = kernel("rows_normed", x.dtype, x.shape[-1], y is not x, x.device)
    num_rows = mean.numel()
    # eps goes as the bits of a float: a kernel takes whole numbers of 64 bits.
    launch(-(-num_rows // ROWS), [*(t.data_ptr() for t in tensors), num_rows, _bits(eps)])
    return normed, mean, rstd


_library.impl("layer_norm", _layer_norm, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rekindle::layer_norm",
    lambda x, *rest: aten.native_layer_norm.default(x, *rest),
    lib=_library,
)

layer_norm = torch.ops.rekindle.layer_norm.default


def sum_and_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The sum, written over `out` where one is given, and its layer norm over the last dimension
    with mean and inverse deviation."""
    if not x.is_cuda or x is y or not _aligned(x, y, weight, bias):
        total = aten.add.Tensor(x, y) if out is None else aten.add.out(x, y, out=out)
        return (total, *layer_norm(total, [x.shape[-1]], weight, bias, eps))
    total = torch.empty_like(x) if out is None else out
    return (total, *_normed(x, y, weight, bias, eps, total))


def norm_forward(edit: GraphEdit) -> None:
    """The layer norms of a forward. Those of sums may be made with the sum: which are, a
    schedule says, where the two follow each other (`lower.fused_steps`)."""
    for node in edit.nodes:
        if node.target is not aten.native_layer_norm.default:
            continue
        x, shape, weight, bias = node.args[:4]
        given = [facts(n).value for n in (x, weight, bias) if isinstance(n, fx.Node)]
        if len(given) == 3 and _fits(edit, shape, *given):
            node.target = layer_norm
            assert isinstance(x, fx.Node)
            # Marked, not joined: whether sum and norm follow each other is known when there is a
            # schedule.
            values = [facts(a).value for a in x.args] if _is_sum(x) else []
            if values and edit.fits(given[0], *values):
                set_facts(node, replace(facts(node), with_sum=True))


def _is_sum(node: fx.Node) -> bool:
    """Of two tensors, each as large as the sum."""
    return bool(
        node.target is aten.add.Tensor
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(a, fx.Node) for a in node.args)
        and all(facts(a).value.shape == facts(node).value.shape for a in node.args)
    )


def _fits(edit: GraphEdit, shape: Any, first: torch.Tensor, *others: torch.Tensor) -> bool:
    return (
        edit.fits(first, *others)
        and first.dtype in (torch.float32, torch.bfloat16)
        and list(shape) == [first.shape[-1]]
        and first.shape[-1] % VECTOR == 0
        and first.shape[-1] <= LONGEST
        and (not first.is_cuda or _works(first.dtype, first.shape[-1], first.device))
    )


# --- backward -----------------------------------------------------------------------------------

_library.define(
    "layer_norm_backward(Tensor grad, Tensor x, int[] shape, Tensor mean, Tensor rstd,"
    " Tensor weight, Tensor bias, Tensor? other) -> (Tensor, Tensor, Tensor)"
)


def _layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The gradient of the norm's input, with `other` added to it, and those of weight and bias."""
    given = (grad, x, shape, mean, rstd, weight, bias)
    # A kernel without a sum does not read it, but an address there must be.
    plus = grad if other is None else other
    if not x.is_cuda or not _aligned(grad, x, weight, plus):
        made, *rest = aten.native_layer_norm_backward.default(*given, [True, True, True])
        return (made if other is None else aten.add.Tensor(made, other), *rest)
    num_rows, length = mean.numel(), shape[0]
    out = torch.empty_like(x)
    launch = kernel("rows_backward", x.dtype, length, other is not None, x.device)
    addresses = [t.data_ptr() for t in (grad, x, mean, rstd, weight, plus, out)]
    launch(-(-num_rows // ROWS), [*addresses, num_rows, length])
    # Of fewer or more rows torch sums the columns in another order, so its own kernel makes these.
    if not FEWEST_ROWS <= num_rows <= MOST_ROWS or length % 8:
        rest = aten.native_layer_norm_backward.default(*given, [False, True, True])[1:]
        return (out, *rest)
    by_weight, by_bias = torch.empty_like(weight), torch.empty_like(bias)
    launch = kernel("columns_backward", x.dtype, length, False, x.device)
    addresses = [t.data_ptr() for t in (grad, x, mean, rstd, by_weight, by_bias)]
    launch(length // 8, [*addresses, num_rows])
    return out, by_weight, by_bias


_library.impl("layer_norm_backward", _layer_norm_backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rekindle::layer_norm_backward",
    lambda _grad, x, _shape, _mean, _rstd, weight, bias, _other: (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(bias),
    ),
    lib=_library,
)

layer_norm_backward = torch.ops.rekindle.layer_norm_backward.default


def norm_backward(edit: GraphEdit) -> None:
    """The layer norms of a backward; where the gradient of the input is added to another and not
    read elsewhere, with that sum."""
    # All of them first: what is changed below moves nodes about.
    norms = [node for node in edit.backward if _is_replaced(edit, node)]
    if not norms:  # on most graphs: what follows walks all of it
        return
    place = {node: k for k, node in enumerate(edit.graph.nodes)}
    written = {facts(w).storage for node in place for w in facts(node).writes}
    results = frozenset(edit.results)  # as many as there are parameters, and asked for each norm
    for node in norms:
        *given, _ = node.args
        x = given[1]
        node.target, node.args = layer_norm_backward, (*given, None)
        found = _sum_behind(node, results)
        if found is None:
            continue
        made, total, other = found
        # The other is read where the gradient is made, not where it was added.
        there = place[other] < place[node] and facts(other).storage not in written
        if there and edit.fits(facts(x).value, facts(other).value, facts(total).value):
            node.args = (*given, other)
            # The sum takes the place of the gradient, which nobody reads any more.
            made.append(total)  # outputs stand right behind their op
            total.target, total.args = operator.getitem, (node, 0)
            edit.graph.erase_node(made)


def _is_replaced(edit: GraphEdit, node: fx.Node) -> bool:
    """Whether it is torch's backward of a layer norm that the kernel can take the place of."""
    if node.target is not aten.native_layer_norm_backward.default:
        return False
    grad, x, shape, mean, _, weight, bias, mask = node.args
    if not isinstance(weight, fx.Node) or not isinstance(bias, fx.Node):
        return False
    # The kernel makes all three gradients, and reads statistics in float32 alone.
    if list(mask) != [True] * 3 or facts(mean).value.dtype != torch.float32:
        return False
    return _fits(edit, shape, *(facts(n).value for n in (x, grad, weight, bias)))


def _sum_behind(node: fx.Node, results: Set[fx.Node]) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The gradient of the input, the sum it is part of, and what it is added to."""
    made = [n for n in node.users if n.target is operator.getitem and n.args[1] == 0]
    if len(made) != 1 or made[0] in results or len(made[0].users) != 1:
        return None
    [total] = made[0].users
    others = [n for n in total.args if n is not made[0]]
    if not _is_sum(total) or len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    return made[0], total, others[0]


# --- whether they are torch's -------------------------------------------------------------------


@tried_once
def _works(dtype: torch.dtype, length: int, device: torch.device) -> bool:
    """Whether the kernels give torch's numbers: those with a sum are tried, the others being the
    same without it. 1000 rows: the gradients of weight and bias come from a kernel too."""
    generator = torch.Generator(device).manual_seed(0)
    x, y, grad, other, scales = torch.randn(
        5, 1000, length, generator=generator, device=device
    ).mul_(3).to(dtype)  # fmt: skip
    weight, bias = scales[0].clone(), scales[1].clone()
    total = aten.add.Tensor(x, y)
    theirs = aten.native_layer_norm.default(total, [length], weight, bias, 1e-5)
    given = (grad, total, [length], *theirs[1:], weight, bias)
    gradients = aten.native_layer_norm_backward.default(*given, [True, True, True])
    ours = (*sum_and_norm(x, y, weight, bias, 1e-5), *layer_norm_backward(*given, other))
    expected = (total, *theirs, aten.add.Tensor(gradients[0], other), *gradients[1:])
    return same_numbers(ours, expected)
