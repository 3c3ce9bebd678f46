"""CUDA source of layer norm and its backward, in torch's order of sums.

A thread's share of a row is summed one after the other, then across the lanes of a warp by halves,
then across the warps; torch gives a row to four warps, here one has all of it. So are the sums of a
column, which torch makes for 32 columns in a block and these kernels for 8.
"""

import functools

import torch

from rekindle.rewrite.kernels.elementwise import CONVERSIONS, TYPES
from rekindle.torch_compat import CudaKernel

_WARPS, VECTOR = 4, 4  # in torch's kernels: of a row, and elements that a thread takes at once
ROWS = 4  # of a block here, one for each warp
_THREADS = 32 * ROWS
LONGEST = 2048  # elements of a row, which stay in registers


def _prelude(dtype: torch.dtype, length: int, with_other: bool) -> str:
    widen, narrow = ("widen", "narrow") if dtype == torch.bfloat16 else ("(float)", "")
    return f"""{CONVERSIONS}
typedef {TYPES[dtype]} T;
struct __align__({VECTOR * dtype.itemsize}) V {{ T v[{VECTOR}]; }};
#define WIDE(x) {widen}(x)
#define NARROW(x) {narrow}(x)
#define WITH_OTHER {int(with_other)}
#define LENGTH {length}
#define VECTORS (LENGTH / {VECTOR})
#define SHARE ((VECTORS + {32 * _WARPS - 1}) / {32 * _WARPS})
#define ALL 0xffffffffu
// The vectors of a lane, as the lanes of torch's warps have them.
#define EACH_WARP _Pragma("unroll") for (int w = 0; w < {_WARPS}; ++w)
#define EACH_VECTOR _Pragma("unroll") for (int j = 0; j < SHARE; ++j) \\
  if (const int i = lane + 32 * w + {32 * _WARPS} * j; i < VECTORS)
#define EACH_ELEMENT _Pragma("unroll") for (int k = 0; k < {VECTOR}; ++k)
"""


_NORM = """
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
extern "C" __global__ void rows_normed(
    const T* x, const T* y, const T* weight, const T* bias, T* sum, T* out, float* mean,
    float* rstd, long long num_rows, long long eps_bits) {
  const int lane = threadIdx.x % 32;
  const long long row = blockIdx.x * (blockDim.x / 32LL) + threadIdx.x / 32;
  if (row >= num_rows) return;
  const V* xs = (const V*)(x + row * LENGTH);
  const V* ys = (const V*)(y + row * LENGTH);
  V* sums = (V*)(sum + row * LENGTH);
  V kept[4][SHARE];
  EACH_WARP EACH_VECTOR {
    kept[w][j] = xs[i];
#if WITH_OTHER
    const V other = ys[i];
    EACH_ELEMENT kept[w][j].v[k] =
        NARROW(__fadd_rn(WIDE(kept[w][j].v[k]), WIDE(other.v[k])));
    sums[i] = kept[w][j];
#endif
  }
  Moments m[4];
  EACH_WARP {
    m[w] = {0.f, 0.f, 0.f};
    EACH_VECTOR { EACH_ELEMENT m[w] = and_one(m[w], WIDE(kept[w][j].v[k])); }
    if (32 * w < VECTORS)
      for (int off = 16; off > 0; off >>= 1)
        m[w] = both(m[w], {__shfl_down_sync(ALL, m[w].mean, off),
                           __shfl_down_sync(ALL, m[w].squares, off),
                           __shfl_down_sync(ALL, m[w].num, off)});
  }
  m[0] = both(both(m[0], m[2]), both(m[1], m[3]));
  const float middle = __shfl_sync(ALL, m[0].mean, 0);
  const float spread = __shfl_sync(ALL, m[0].squares / (float)LENGTH, 0);
  const float scale = rsqrtf(spread + __int_as_float((int)eps_bits));
  V* outs = (V*)(out + row * LENGTH);
  EACH_WARP EACH_VECTOR {
    const V by = ((const V*)weight)[i], plus = ((const V*)bias)[i];
    V result;
    EACH_ELEMENT {
      const float normed = scale * (WIDE(kept[w][j].v[k]) - middle);
      result.v[k] = NARROW(WIDE(by.v[k]) * normed + WIDE(plus.v[k]));
    }
    outs[i] = result;
  }
  if (lane == 0) {
    mean[row] = middle;
    rstd[row] = scale;
  }
}
"""

_BACKWARD = """
__device__ __forceinline__ float over_warp(float x) {
  #pragma unroll
  for (int off = 16; off > 0; off >>= 1) x += __shfl_down_sync(ALL, x, off);
  return x + 0.f;  // as from a warp that has zeros behind the sums of the four
}
__device__ __forceinline__ float over_row(const float* sums) {
  return __shfl_sync(ALL, (sums[0] + sums[2]) + (sums[1] + sums[3]), 0);
}
extern "C" __global__ void rows_backward(
    const T* grad, const T* x, const float* mean, const float* rstd, const T* weight,
    const T* other, T* out, long long num_rows, long long length) {
  const int lane = threadIdx.x % 32;
  const long long row = blockIdx.x * (blockDim.x / 32LL) + threadIdx.x / 32;
  if (row >= num_rows) return;
  const V* grads = (const V*)(grad + row * LENGTH);
  const V* xs = (const V*)(x + row * LENGTH);
  const V* others = (const V*)(other + row * LENGTH);
  const float middle = mean[row], scale = rstd[row];
  V kept_g[4][SHARE], kept_x[4][SHARE];
  EACH_WARP EACH_VECTOR {
    kept_g[w][j] = grads[i];
    kept_x[w][j] = xs[i];
  }
  float sums[4], products[4];
  EACH_WARP {
    float sum = 0.f, product = 0.f;
    EACH_VECTOR {
      const V by = ((const V*)weight)[i];
      EACH_ELEMENT {
        const float b = WIDE(by.v[k]), h = WIDE(kept_x[w][j].v[k]), g = WIDE(kept_g[w][j].v[k]);
        sum += g * b;
        product += g * b * (h - middle) * scale;
      }
    }
    sums[w] = over_warp(sum);
    products[w] = over_warp(product);
  }
  const float sum = over_row(sums), product = over_row(products);
  const float num = (float)(int)length;
  const float last = (1.f / num) * scale;
  V* outs = (V*)(out + row * LENGTH);
  EACH_WARP EACH_VECTOR {
    const V by = ((const V*)weight)[i];
    V result;
    EACH_ELEMENT {
      const float b = WIDE(by.v[k]), h = WIDE(kept_x[w][j].v[k]), g = WIDE(kept_g[w][j].v[k]);
      float made = num * b * g;
      made -= (h - middle) * scale * product;
      made -= sum;
      made *= last;
      result.v[k] = NARROW(made);
    }
#if WITH_OTHER
    const V plus = others[i];
    EACH_ELEMENT result.v[k] = NARROW(__fadd_rn(WIDE(result.v[k]), WIDE(plus.v[k])));
#endif
    outs[i] = result;
  }
}
"""


# torch gives 32 columns to a block, and 8 rows in turn to each of its 32 rows of threads.
_COLUMNS = """
extern "C" __global__ void __launch_bounds__(256, 2) columns_backward(
    const T* __restrict__ grad, const T* __restrict__ x, const float* __restrict__ mean,
    const float* __restrict__ rstd, T* by_weight, T* by_bias, long long num_rows) {
  __shared__ float shared[2][32][9];
  const int at = threadIdx.x % 8, part = threadIdx.x / 8;
  const long long column = blockIdx.x * 8LL + at;
  float product = 0.f, sum = 0.f;
  long long row = 8 * part;
  for (; row + 256 + 8 <= num_rows; row += 512) {  // many reads at once
    T g[16], h[16];
    float middle[16], scale[16];
    #pragma unroll
    for (int k = 0; k < 16; ++k) {
      const long long r = row + k % 8 + k / 8 * 256;
      g[k] = grad[r * LENGTH + column];
      h[k] = x[r * LENGTH + column];
      middle[k] = mean[r];
      scale[k] = rstd[r];
    }
    #pragma unroll
    for (int k = 0; k < 16; ++k) {
      product += WIDE(g[k]) * (WIDE(h[k]) - middle[k]) * scale[k];
      sum += WIDE(g[k]);
    }
  }
  for (; row < num_rows; row += 256) {
    #pragma unroll
    for (int k = 0; k < 8; ++k) {
      const long long r = row + k < num_rows ? row + k : row;
      const float g = row + k < num_rows ? WIDE(grad[r * LENGTH + column]) : 0.f;
      product += g * (WIDE(x[r * LENGTH + column]) - mean[r]) * rstd[r];
      sum += g;
    }
  }
  shared[0][part][at] = product;
  shared[1][part][at] = sum;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  product = shared[0][lane][warp];
  sum = shared[1][lane][warp];
  #pragma unroll
  for (int off = 16; off > 0; off >>= 1) {
    product += __shfl_xor_sync(ALL, product, off);
    sum += __shfl_xor_sync(ALL, sum, off);
  }
  if (lane == 0) {
    by_weight[blockIdx.x * 8LL + warp] = NARROW(product);
    by_bias[blockIdx.x * 8LL + warp] = NARROW(sum);
  }
}
"""
FEWEST_ROWS, MOST_ROWS = 256, 64 * 1024  # of fewer or more, torch makes these sums otherwise

_SOURCES = {"rows_normed": _NORM, "rows_backward": _BACKWARD, "columns_backward": _COLUMNS}


@functools.cache
def kernel(
    name: str, dtype: torch.dtype, length: int, with_other: bool, device: torch.device
) -> CudaKernel:
    """The kernel of this name for rows of this length, compiled on first use."""
    # One source per length: loops over a row are unrolled, and the row stays in registers.
    source = _prelude(dtype, length, with_other) + _SOURCES[name]
    num_threads = CudaKernel.num_threads if name == "columns_backward" else _THREADS
    return CudaKernel(source, name, device, num_threads)
