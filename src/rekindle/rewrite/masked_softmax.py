"""Softmax of scores of which whole rows may be masked, in one pass more, not four.

Where attention is not one kernel, torch's `_safe_softmax` is softmax, and zeros in rows of which
all numbers are minus infinity. It finds those rows by a comparison of all numbers, a reduction and
a selection, each a pass over tensors as large as the scores. Such a row is one whose softmax begins
with NaN: `rekindle::masked_softmax` runs softmax as torch does and looks at the first number of
each row; only where that is NaN is the row of scores read again.

The bits are eager's: what is not masked is what softmax gave.
"""

import functools
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts
from rekindle.rewrite.exactness import same_numbers, tried_once
from rekindle.rewrite.graph_edit import GraphEdit
from rekindle.torch_compat import CudaKernel

aten = torch.ops.aten

# dtype -> in CUDA: its bits, those of the sign, and of infinity
_BITS = {
    torch.float32: ("unsigned int", "0x80000000u", "0x7f800000u"),
    torch.bfloat16: ("unsigned short", "0x8000u", "0x7f80u"),
    torch.float16: ("unsigned short", "0x8000u", "0x7c00u"),
}

_library = torch.library.Library("rekindle", "FRAGMENT")
_library.define("masked_softmax(Tensor scores) -> Tensor")


def _masked_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Over the last dimension."""
    if not scores.is_cuda or not scores.is_contiguous():
        return aten._safe_softmax.default(scores, -1)
    out = aten._softmax.default(scores, -1, False)
    num = scores.shape[-1]
    num_rows = scores.numel() // num
    # A warp per row: 32 threads.
    num_warps = CudaKernel.num_threads // 32
    kernel = _kernel(scores.dtype, scores.device)
    kernel(-(-num_rows // num_warps), [scores.data_ptr(), out.data_ptr(), num_rows, num])
    return out


_library.impl("masked_softmax", _masked_softmax, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rekindle::masked_softmax", lambda scores: scores.new_empty(scores.shape), lib=_library
)

masked_softmax = torch.ops.rekindle.masked_softmax.default


@functools.cache
def _kernel(dtype: torch.dtype, device: torch.device) -> CudaKernel:
    bits, sign, infinity = _BITS[dtype]
    source = f"""
typedef {bits} T;
extern "C" __global__ void clear_masked_rows(
    const T* scores, T* out, long long num_rows, long long num) {{
  const long long row = blockIdx.x * (blockDim.x / 32LL) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= num_rows) return;
  scores += row * num;
  out += row * num;
  if ((out[0] & ~{sign}) <= {infinity}) return;  // not NaN
  bool masked = true;
  for (long long i = lane; i < num; i += 32) masked &= scores[i] == ({sign} | {infinity});
  if (!__all_sync(0xffffffffu, masked)) return;
  for (long long i = lane; i < num; i += 32) out[i] = 0;
}}"""
    return CudaKernel(source, "clear_masked_rows", device)


@tried_once
def _works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel gives softmax's numbers, where rows are masked in part and as a whole."""
    scores = torch.randn(70, 50, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    # Rows masked in part, wholly masked, with NaN, with infinity, and with one number left at the
    # end.
    scores[:20, 7:] = -torch.inf
    scores[3:12] = -torch.inf
    scores[5, 49] = torch.nan
    scores[6, 0] = torch.inf
    scores[30:35, :49] = -torch.inf
    return same_numbers([masked_softmax(scores)], [aten._safe_softmax.default(scores, -1)])


def mask_in_one_pass(edit: GraphEdit) -> None:
    """The softmaxes of a forward."""
    for node in edit.nodes:
        if node.target is aten._safe_softmax.default and _fits(edit, node):
            node.target, node.args = masked_softmax, (node.args[0],)


def _fits(edit: GraphEdit, node: fx.Node) -> bool:
    scores, dim, *rest = node.args
    assert isinstance(scores, fx.Node)
    value: Any = facts(scores).value
    return (
        not rest
        and not node.kwargs
        and (edit.anywhere or value.is_cuda)
        and value.dtype in _BITS
        and value.numel() >= edit.smallest
        and value.is_contiguous()
        and facts(node).value.is_contiguous()
        and dim in (-1, value.dim() - 1)
        and (not value.is_cuda or _works(value.dtype, value.device))
    )
