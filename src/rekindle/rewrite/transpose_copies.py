"""Copies that turn a tensor around, read and written in whole lines of memory.

A model that mixes tokens and channels, or moves channels to the end for a norm, copies tensors of
which the last dimension is not the one that lies together in memory. torch's kernel for that reads
or writes single numbers far apart, at a sixth of the bandwidth. Here such a copy goes through tiles
in shared memory (`rekindle::turned`); so does a sum of two tensors in two such orders
(`rekindle::add_turned`). Layer norm makes such copies of its arguments inside: it is given the copy
instead.

The bits are eager's: a copy changes none, the sum rounds once, and layer norm runs the same kernel
on the same dense tensors.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts, set_facts
from rekindle.rewrite.exactness import same_numbers, tried_once
from rekindle.rewrite.graph_edit import GraphEdit
from rekindle.rewrite.kernels.elementwise import CONVERSIONS
from rekindle.torch_compat import CudaKernel

aten = torch.ops.aten

_MIN_SIDE = 16  # of what is turned; below this there are no lines to read
_SIDE = 64  # of a tile: sixteen reads of each thread are under way at once

# dtype -> its bits, in CUDA; those that can be added as well
_BITS = {torch.float32: "unsigned int", torch.bfloat16: "unsigned short"}
_BITS |= {torch.float16: "unsigned short"}
_SUMS = (torch.float32, torch.bfloat16)

# --- layouts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A tensor of sizes (outer, inner, rows, columns), read where its rows lie together: strides
    (step_outer, step_inner, 1, step_column), to be written densely in that order."""

    outer: int
    inner: int
    rows: int
    columns: int
    step_outer: int
    step_inner: int
    step_column: int


@functools.lru_cache(maxsize=4096)
def turn_of(shape: tuple[int, ...], stride: tuple[int, ...], made: tuple[int, ...]) -> Turn | None:
    """How a tensor of this shape and stride is turned when it is written with the strides `made`,
    which are dense in some order of the dimensions; None where it is not turned."""
    # As they lie in the result, the outermost first; neighbours that stay together are one.
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: -made[d])
    digits: list[tuple[int, int]] = []  # size and stride, from the outermost of the result
    for d in order:
        if digits and digits[-1][1] == stride[d] * shape[d]:
            digits[-1] = (digits[-1][0] * shape[d], stride[d])
        else:
            digits.append((shape[d], stride[d]))
    if not 2 <= len(digits) <= 4:
        return None
    digits = [(1, 0)] * (4 - len(digits)) + digits
    (outer, step_outer), (inner, step_inner), (rows, step_row), (columns, step_column) = digits
    # Rows lie together in the source, columns in the result; columns may not overlap.
    if step_row != 1 or step_column < rows or min(rows, columns) < _MIN_SIDE:
        return None
    return Turn(outer, inner, rows, columns, step_outer, step_inner, step_column)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Every element once, in some order of the dimensions."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


# --- the ops ------------------------------------------------------------------------------------

_library = torch.library.Library("rekindle", "FRAGMENT")
_library.define("turned(Tensor x) -> Tensor")
_library.define("add_turned(Tensor x, Tensor other) -> Tensor")


def _turned(x: torch.Tensor) -> torch.Tensor:
    turn = None
    if x.is_cuda:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        turn = turn_of(tuple(x.shape), x.stride(), out.stride())
    if turn is None:
        return x.clone(memory_format=torch.contiguous_format)
    _launch(_kernel(x.dtype, False, x.device), turn, [x.data_ptr(), out.data_ptr()])
    return out


def _add_turned(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum in the layout of `x`, to which `other` is turned."""
    turn = turn_of(tuple(x.shape), other.stride(), x.stride()) if x.is_cuda else None
    if turn is None:
        return x + other
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    addresses = [other.data_ptr(), x.data_ptr(), out.data_ptr()]
    _launch(_kernel(x.dtype, True, x.device), turn, addresses)
    return out


_library.impl("turned", _turned, "CompositeExplicitAutograd")
_library.impl("add_turned", _add_turned, "CompositeExplicitAutograd")
torch.library.register_fake("rekindle::turned", lambda x: x.new_empty(x.shape), lib=_library)
torch.library.register_fake(
    "rekindle::add_turned",
    lambda x, _other: x.new_empty_strided(x.shape, x.stride()),
    lib=_library,
)

turned = torch.ops.rekindle.turned.default
add_turned = torch.ops.rekindle.add_turned.default

# --- the kernel ---------------------------------------------------------------------------------

_SOURCE = """
__device__ __forceinline__ unsigned int sum(unsigned int a, unsigned int b) {
  return __float_as_int(__fadd_rn(__int_as_float(a), __int_as_float(b)));
}
__device__ __forceinline__ unsigned short sum(unsigned short a, unsigned short b) {
  return narrow(__fadd_rn(widen(a), widen(b)));
}
extern "C" __global__ void NAME(
    const T* __restrict__ x, ADDEND T* __restrict__ out,
    long long inner, long long rows, long long columns,
    long long step_outer, long long step_inner, long long step_column) {
  __shared__ T tile[SIDE][SIDE + PAD];
  const long long tiles_down = (rows + SIDE - 1) / SIDE, tiles_across = (columns + SIDE - 1) / SIDE;
  long long at = blockIdx.x;
  const long long column = at % tiles_across * SIDE;
  at /= tiles_across;
  const long long row = at % tiles_down * SIDE;
  at /= tiles_down;
  const T* from = x + at / inner * step_outer + at % inner * step_inner;
  const long long to = at * rows * columns;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  #pragma unroll
  for (int c = warp; c < SIDE; c += 8) {
    #pragma unroll
    for (int r = lane; r < SIDE; r += 32)
      if (column + c < columns && row + r < rows)
        tile[c][r] = from[(column + c) * step_column + row + r];
  }
  __syncthreads();
  #pragma unroll
  for (int r = warp; r < SIDE; r += 8) {
    #pragma unroll
    for (int c = lane; c < SIDE; c += 32)
      if (column + c < columns && row + r < rows) {
        const long long i = to + (row + r) * columns + column + c;
        out[i] = RESULT;
      }
  }
}
"""


@functools.cache
def _kernel(dtype: torch.dtype, is_sum: bool, device: torch.device) -> CudaKernel:
    name = "add_turned" if is_sum else "turned"
    words = {
        "NAME": name,
        "ADDEND": "const T* other," if is_sum else "",
        "RESULT": "sum(other[i], tile[c][r])" if is_sum else "tile[c][r]",
        "SIDE": str(_SIDE),
        "PAD": str(4 // dtype.itemsize),  # so that a column of the tile lies in all banks
    }
    source = f"typedef {_BITS[dtype]} T;" + CONVERSIONS + _SOURCE
    for word, text in words.items():
        source = source.replace(word, text)
    return CudaKernel(source, name, device)


def _launch(kernel: CudaKernel, turn: Turn, addresses: list[int]) -> None:
    tiles = -(-turn.rows // _SIDE) * -(-turn.columns // _SIDE) * turn.outer * turn.inner
    sizes = (turn.inner, turn.rows, turn.columns)
    kernel(tiles, [*addresses, *sizes, turn.step_outer, turn.step_inner, turn.step_column])


@tried_once
def _works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels give the copy's numbers and, of a dtype that is added, the sum's. The
    sides are no multiples of a tile's."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(2, 3, 4, 70, 50, generator=generator, device=device)
    a, b = numbers.to(dtype)
    kept = a.transpose(-1, -2)
    ours, theirs = [turned(kept)], [kept]
    if dtype in _SUMS:
        other = b.mT.contiguous().mT
        ours.append(add_turned(a, other))
        theirs.append(a + other)
    return same_numbers(ours, theirs)


# --- rewriting ----------------------------------------------------------------------------------


def transpose_in_tiles(edit: GraphEdit) -> None:
    """Copies, sums and layer norms of turned tensors in a forward."""
    _turn(edit, edit.nodes)


def transpose_in_tiles_backward(edit: GraphEdit) -> None:
    """The same in a backward."""
    _turn(edit, edit.backward)


def _turn(edit: GraphEdit, nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        if node.target is aten.clone.default:
            value = facts(node).value
            if (
                value.numel() >= edit.smallest  # asked first, as the cheapest: see _turn_arguments
                and value.is_contiguous()
                and _is_turned(edit, node.args[0], value)
            ):
                node.target, node.args, node.kwargs = turned, (node.args[0],), {}
        elif node.target is aten.add.Tensor:
            _turn_sum(edit, node)
        elif node.target is aten.native_layer_norm.default:
            _turn_arguments(edit, node, (0,))
        elif node.target is aten.native_layer_norm_backward.default:
            _turn_arguments(edit, node, (0, 1))


def _is_turned(edit: GraphEdit, source: Any, made: torch.Tensor) -> bool:
    """Whether the source lies turned to what is made of it, in a way and size that pays."""
    value = facts(source).value if isinstance(source, fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and (edit.anywhere or value.is_cuda)
        and value.numel() >= edit.smallest
        and value.dtype in _BITS
        and value.dtype == made.dtype
        and value.shape == made.shape
        and turn_of(tuple(value.shape), value.stride(), made.stride()) is not None
        and (not value.is_cuda or _works(value.dtype, value.device))
    )


def _turn_sum(edit: GraphEdit, node: fx.Node) -> None:
    made = facts(node).value
    if node.kwargs or len(node.args) != 2 or not all(isinstance(a, fx.Node) for a in node.args):
        return
    if made.numel() < edit.smallest or made.dtype not in _SUMS:
        return
    if not _is_dense(made.shape, made.stride()):
        return
    values = [facts(a).value for a in node.all_input_nodes]
    # One of the two lies as the sum does, the other is turned to it.
    kept = [k for k, v in enumerate(values) if v.stride() == made.stride()]
    if (
        len(values) != 2
        or len(kept) != 1
        or any(v.dtype != made.dtype or v.shape != made.shape for v in values)
    ):
        return
    other = node.args[1 - kept[0]]
    if _is_turned(edit, other, made):
        node.target, node.args = add_turned, (node.args[kept[0]], other)


def _turn_arguments(edit: GraphEdit, node: fx.Node, positions: Sequence[int]) -> None:
    """The op copies these arguments where they are not contiguous: it gets the copies."""
    args = list(node.args)
    for k in positions:
        source = args[k]
        assert isinstance(source, fx.Node)
        value = facts(source).value
        # Asked first: a fake tensor takes longer to make than all else that is done to a node.
        if value.numel() < edit.smallest or value.is_contiguous():
            continue
        made = value.new_empty(value.shape)
        if not _is_turned(edit, source, made):
            continue
        with edit.graph.inserting_before(node):
            copy = edit.graph.call_function(turned, (source,))
        num_bytes = value.numel() * value.dtype.itemsize
        storage = edit.new_storage()
        known = replace(
            facts(node), value=made, storage=storage, storage_bytes=num_bytes, writes=()
        )
        set_facts(copy, known)
        args[k] = copy
    node.args = tuple(args)
