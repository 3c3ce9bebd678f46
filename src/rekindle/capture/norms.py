"""Layer norm together with the sum before it, and its backward with the sum behind it.

A residual sum is written and read again by the layer norm that follows; on the way back the
gradient of a norm's input is written and read again by the sum with the gradient that passed the
block by. Here each pair is one kernel. It makes the sums of a row in the order of torch's kernels,
step for step: a thread's share of a row one after the other, then across the lanes of a warp by
halves, then across the warps. Whether the bits are torch's is tried on each device, dtype and
length of a row, before a kernel is used.
"""

import functools
import operator
import struct
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import fx

from rekindle.capture.apart import Surgery
from rekindle.capture.kernel import CONVERSIONS, TYPES
from rekindle.torch_compat import CudaKernel

aten = torch.ops.aten

_THREADS = 128  # of a row, in torch's kernels
_VECTOR = 4  # elements that a thread takes at once, in torch's kernels
LONGEST = 4096  # elements of a row, which stay in registers


def _prelude(dtype: torch.dtype, length: int) -> str:
    widen, narrow = ("widen", "narrow") if dtype == torch.bfloat16 else ("(float)", "")
    return f"""{CONVERSIONS}
typedef {TYPES[dtype]} T;
struct __align__({_VECTOR * dtype.itemsize}) V {{ T v[{_VECTOR}]; }};
#define WIDE(x) {widen}(x)
#define NARROW(x) {narrow}(x)
#define LENGTH {length}
#define VECTORS (LENGTH / {_VECTOR})
#define SHARE ((VECTORS + {_THREADS - 1}) / {_THREADS})
"""


_SUM_AND_NORM = """
struct Moments { float mean, squares, num; };
__device__ __forceinline__ Moments and_one(const Moments m, float x) {
  const float away = x - m.mean;
  const float num = m.num + 1.f;
  const float mean = m.mean + away * (1.f / num);
  return {mean, m.squares + away * (x - mean), num};
}
__device__ __forceinline__ Moments both(const Moments b, const Moments a) {
  const float away = b.mean - a.mean;
  const float num = a.num + b.num;
  if (!(num > 0.f)) return {0.f, 0.f, num};
  const float share = 1.f / num;
  const float of_a = a.num * share;
  const float of_b = b.num * share;
  return {of_a * a.mean + of_b * b.mean, a.squares + b.squares + away * away * a.num * of_b, num};
}
extern "C" __global__ void sum_and_norm(
    const T* x, const T* y, const T* weight, const T* bias, T* sum, T* out, float* mean,
    float* rstd, long long eps_bits) {
  __shared__ float shared[3 * 4];
  const long long row = blockIdx.x;
  const V* xs = (const V*)(x + row * LENGTH);
  const V* ys = (const V*)(y + row * LENGTH);
  V* sums = (V*)(sum + row * LENGTH);
  V kept[SHARE];
  Moments m = {0.f, 0.f, 0.f};
  #pragma unroll
  for (int j = 0; j < SHARE; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i < VECTORS) {
      const V a = xs[i], b = ys[i];
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        kept[j].v[k] = NARROW(__fadd_rn(WIDE(a.v[k]), WIDE(b.v[k])));
        m = and_one(m, WIDE(kept[j].v[k]));
      }
      sums[i] = kept[j];
    }
  }
  for (int off = 16; off > 0; off >>= 1) {
    const Moments next = {__shfl_down_sync(0xffffffffu, m.mean, off),
                          __shfl_down_sync(0xffffffffu, m.squares, off),
                          __shfl_down_sync(0xffffffffu, m.num, off)};
    m = both(m, next);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int off = 2; off > 0; off /= 2) {
    if (lane == 0 && warp >= off && warp < 2 * off) {
      shared[3 * (warp - off)] = m.mean;
      shared[3 * (warp - off) + 1] = m.squares;
      shared[3 * (warp - off) + 2] = m.num;
    }
    __syncthreads();
    if (lane == 0 && warp < off) {
      const Moments next = {shared[3 * warp], shared[3 * warp + 1], shared[3 * warp + 2]};
      m = both(m, next);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    shared[0] = m.mean;
    shared[1] = m.squares / (float)LENGTH;
  }
  __syncthreads();
  const float middle = shared[0];
  const float scale = rsqrtf(shared[1] + __int_as_float((int)eps_bits));
  V* outs = (V*)(out + row * LENGTH);
  #pragma unroll
  for (int j = 0; j < SHARE; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i < VECTORS) {
      const V w = ((const V*)weight)[i], b = ((const V*)bias)[i];
      V result;
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float normed = scale * (WIDE(kept[j].v[k]) - middle);
        result.v[k] = NARROW(WIDE(w.v[k]) * normed + WIDE(b.v[k]));
      }
      outs[i] = result;
    }
  }
  if (threadIdx.x == 0) {
    mean[row] = middle;
    rstd[row] = scale;
  }
}
"""

_BACKWARD_AND_SUM = """
__device__ __forceinline__ float over_warp(float x) {
  #pragma unroll
  for (int off = 16; off > 0; off >>= 1) x += __shfl_down_sync(0xffffffffu, x, off);
  return x;
}
__device__ __forceinline__ float over_block(float x, float* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = over_warp(x);
  __syncthreads();
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  x = threadIdx.x < blockDim.x / 32 ? shared[lane] : 0.f;
  return warp == 0 ? over_warp(x) : x;
}
extern "C" __global__ void backward_and_sum(
    const T* grad, const T* x, const float* mean, const float* rstd, const T* weight,
    const T* other, T* out, long long length) {
  __shared__ float shared[4];
  const long long row = blockIdx.x;
  const V* grads = (const V*)(grad + row * LENGTH);
  const V* xs = (const V*)(x + row * LENGTH);
  const V* others = (const V*)(other + row * LENGTH);
  const float middle = mean[row], scale = rstd[row];
  V kept_g[SHARE], kept_x[SHARE];
  float sum = 0.f, product = 0.f;
  #pragma unroll
  for (int j = 0; j < SHARE; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i < VECTORS) {
      kept_g[j] = grads[i];
      kept_x[j] = xs[i];
      const V w = ((const V*)weight)[i];
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float by = WIDE(w.v[k]), h = WIDE(kept_x[j].v[k]), g = WIDE(kept_g[j].v[k]);
        sum += g * by;
        product += g * by * (h - middle) * scale;
      }
    }
  }
  sum = over_block(sum, shared);
  product = over_block(product, shared);
  if (threadIdx.x == 0) {
    shared[0] = sum;
    shared[1] = product;
  }
  __syncthreads();
  sum = shared[0];
  product = shared[1];
  const float num = (float)(int)length;
  const float last = (1.f / num) * scale;
  V* outs = (V*)(out + row * LENGTH);
  #pragma unroll
  for (int j = 0; j < SHARE; ++j) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i < VECTORS) {
      const V w = ((const V*)weight)[i], o = others[i];
      V result;
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float by = WIDE(w.v[k]), h = WIDE(kept_x[j].v[k]), g = WIDE(kept_g[j].v[k]);
        float made = num * by * g;
        made -= (h - middle) * scale * product;
        made -= sum;
        made *= last;
        result.v[k] = NARROW(__fadd_rn(WIDE(NARROW(made)), WIDE(o.v[k])));
      }
      outs[i] = result;
    }
  }
}
"""


@functools.cache
def _kernel(name: str, dtype: torch.dtype, length: int, device: torch.device) -> CudaKernel:
    body = {"sum_and_norm": _SUM_AND_NORM, "backward_and_sum": _BACKWARD_AND_SUM}[name]
    return CudaKernel(_prelude(dtype, length) + body, name, device, _THREADS)


def _bits(x: float) -> int:
    return int(struct.unpack("I", struct.pack("f", x))[0])


def _aligned(*tensors: torch.Tensor) -> bool:
    """A kernel reads vectors."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bool(bits % (_VECTOR * tensors[0].element_size()) == 0)


# --- forward: two neighbours of a schedule ------------------------------------------------------


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
    length = x.shape[-1]
    if not x.is_cuda or not _aligned(x, y, weight, bias):
        total = aten.add.Tensor(x, y) if out is None else aten.add.out(x, y, out=out)
        return (total, *aten.native_layer_norm.default(total, [length], weight, bias, eps))
    total = torch.empty_like(x) if out is None else out
    normed = torch.empty_like(x)
    mean = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    tensors = (x, y, weight, bias, total, normed, mean, rstd)
    kernel = _kernel("sum_and_norm", x.dtype, length, x.device)
    kernel(mean.numel(), [*(t.data_ptr() for t in tensors), _bits(eps)])
    return total, normed, mean, rstd


def mark_norms(surgery: Surgery, nodes: Iterable[fx.Node]) -> None:
    """The layer norms of sums that may be made with the sum: which are, a schedule says, where the
    two follow each other (`lower.neighbours`)."""
    for node in nodes:
        if node.target is aten.native_layer_norm.default and _may_join(surgery, node):
            node.meta["with_sum"] = True


def _may_join(surgery: Surgery, node: fx.Node) -> bool:
    total, shape, weight, bias = node.args[:4]
    return (
        isinstance(total, fx.Node)
        and _is_sum(total)
        and isinstance(weight, fx.Node)
        and isinstance(bias, fx.Node)
        and _fits(surgery, shape, *(n.meta["val"] for n in (total, *total.args, weight, bias)))
    )


def _is_sum(node: fx.Node) -> bool:
    """Of two tensors, each as large as the sum."""
    return bool(
        node.target is aten.add.Tensor
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(a, fx.Node) for a in node.args)
        and all(a.meta["val"].shape == node.meta["val"].shape for a in node.args)
    )


def _fits(surgery: Surgery, shape: Any, first: torch.Tensor, *others: torch.Tensor) -> bool:
    return (
        surgery.fits(first, *others)
        and first.dtype in (torch.float32, torch.bfloat16)
        and list(shape) == [first.shape[-1]]
        and first.shape[-1] % _VECTOR == 0
        and first.shape[-1] <= LONGEST
        and (not first.is_cuda or _works(first.dtype, first.shape[-1], first.device))
    )


# --- backward: one op ---------------------------------------------------------------------------

_library = torch.library.Library("rekindle", "FRAGMENT")
_library.define(
    "layer_norm_backward_add(Tensor grad, Tensor x, int[] shape, Tensor mean, Tensor rstd,"
    " Tensor weight, Tensor bias, Tensor other) -> (Tensor, Tensor, Tensor)"
)


def _backward_add(
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: list[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    other: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of the norm's input with `other` added to it, and those of weight and bias."""
    given = (grad, x, shape, mean, rstd, weight, bias)
    whole = x.is_cuda and _aligned(grad, x, weight, other)
    made, *rest = aten.native_layer_norm_backward.default(*given, [not whole, True, True])
    if not whole:
        return (aten.add.Tensor(made, other), *rest)
    out = torch.empty_like(x)
    addresses = [t.data_ptr() for t in (grad, x, mean, rstd, weight, other, out)]
    kernel = _kernel("backward_and_sum", x.dtype, shape[0], x.device)
    kernel(mean.numel(), [*addresses, shape[0]])
    return (out, *rest)


_library.impl("layer_norm_backward_add", _backward_add, "CompositeExplicitAutograd")
torch.library.register_fake(
    "rekindle::layer_norm_backward_add",
    lambda _grad, x, _shape, _mean, _rstd, weight, bias, _other: (
        torch.empty_like(x),
        torch.empty_like(weight),
        torch.empty_like(bias),
    ),
    lib=_library,
)

layer_norm_backward_add = torch.ops.rekindle.layer_norm_backward_add.default


def join_backward(
    surgery: Surgery, nodes: Iterable[fx.Node], results: Container[fx.Node]
) -> set[fx.Node]:
    """The layer norms of a recorded backward whose gradient is added to another, and not read
    elsewhere. Gives the nodes that are gone."""
    gone: set[fx.Node] = set()
    place = {node: k for k, node in enumerate(surgery.graph.nodes)}
    written = {w.meta["storage"] for node in place for w in node.meta.get("writes", ())}
    for node in nodes:
        if node.target is not aten.native_layer_norm_backward.default:
            continue
        found = _sum_behind(node, results)
        if found is None:
            continue
        made, total, other = found
        grad, x, shape, mean, rstd, weight, bias, mask = node.args
        if not all(isinstance(n, fx.Node) for n in (weight, bias)) or list(mask) != [True] * 3:
            continue
        values = [n.meta["val"] for n in (x, grad, other, weight, bias, total)]
        # `other` is read where the gradient is made, not where it was added.
        if place[other] > place[node] or other.meta.get("storage") in written:
            continue
        if mean.meta["val"].dtype != torch.float32 or not _fits(surgery, shape, *values):
            continue
        node.target = layer_norm_backward_add
        node.args = (grad, x, shape, mean, rstd, weight, bias, other)
        total.target, total.args = operator.getitem, (node, 0)
        surgery.graph.erase_node(made)
        gone.add(made)
    return gone


def _sum_behind(
    node: fx.Node, results: Container[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The gradient of the input, the sum it is part of, and what it is added to."""
    made = [n for n in node.users if n.target is operator.getitem and n.args[1] == 0]
    if len(made) != 1 or made[0] in results or len(made[0].users) != 1:
        return None
    [total] = made[0].users
    if not _is_sum(total):
        return None
    others = [n for n in total.args if n is not made[0]]
    return (made[0], total, others[0]) if len(others) == 1 else None


# --- whether they are torch's -------------------------------------------------------------------


@functools.cache
def _works(dtype: torch.dtype, length: int, device: torch.device) -> bool:
    """Whether both kernels can be compiled and run, and give torch's bits."""
    with torch.random.fork_rng([device]):
        torch.manual_seed(0)
        x, y, grad, other = torch.randn(4, 160, length, device=device).mul_(3).to(dtype)
        weight, bias = torch.randn(2, length, device=device).to(dtype)
    total = aten.add.Tensor(x, y)
    theirs = aten.native_layer_norm.default(total, [length], weight, bias, 1e-5)
    given = (grad, total, [length], *theirs[1:], weight, bias)
    gradients = aten.native_layer_norm_backward.default(*given, [True, True, True])
    try:
        ours = sum_and_norm(x, y, weight, bias, 1e-5)
        back = layer_norm_backward_add(*given, other)
    except RuntimeError:  # no compiler
        return False
    expected = (total, *theirs, aten.add.Tensor(gradients[0], other), *gradients[1:])
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip((*ours, *back), expected, strict=True)
    )
