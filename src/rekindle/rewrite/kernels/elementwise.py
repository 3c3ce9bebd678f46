"""One kernel for an expression of elementwise ops: its CUDA source, and the ops it stands for.

Every step of the source rounds as the op it stands for does; `elementwise_fusion` uses a kernel
only where it is bitwise identical to the separate ops.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.rewrite.split_norm_dropout import APPLY
from rekindle.torch_compat import CudaKernel

aten = torch.ops.aten

_VECTOR = 8  # elements of any type that a thread reads at once, at most

TYPES = {torch.float32: "float", torch.bfloat16: "unsigned short", torch.bool: "bool"}


# Op -> CUDA expression in float of its operands; results are rounded to the op's dtype outside.
SOURCE: dict[Any, Callable[..., str]] = {
    aten.add.Tensor: "__fadd_rn({0}, {1})".format,
    aten.sub.Tensor: "__fsub_rn({0}, {1})".format,
    aten.mul.Tensor: "__fmul_rn({0}, {1})".format,
    aten.mul.Scalar: "__fmul_rn({0}, {1})".format,
    aten.add.Scalar: "__fadd_rn({0}, {1})".format,
    aten.neg.default: "(-({0}))".format,
    aten.tanh.default: "tanhf({0})".format,
    aten.sigmoid.default: "(1.f / (1.f + expf(-({0}))))".format,
    aten.silu.default: "({0} / (1.f + expf(-({0}))))".format,
    aten.silu_backward.default: "silu_backward({0}, {1})".format,
    aten.gelu.default: "({0} * 0.5f * (1.f + erff({0} * 0.70710678118654752440f)))".format,
    aten.gelu_backward.default: "gelu_backward({0}, {1})".format,
    aten.relu.default: "({0} != {0} ? {0} : fmaxf({0}, 0.f))".format,
    aten.threshold_backward.default: "({1} <= {2} ? 0.f : {0})".format,
    aten.native_dropout_backward.default: "__fmul_rn(__fmul_rn({1}, {0}), {2})".format,
    aten._to_copy.default: "{0}".format,
    aten.pow.Tensor_Scalar: "",  # type: ignore[dict-item]  # by the exponent
    aten.div.Tensor: "",  # type: ignore[dict-item]  # by what divides
    aten.div.Scalar: "",  # type: ignore[dict-item]
    aten.tanh_backward.default: "",  # type: ignore[dict-item]  # by the dtype
    **APPLY,
}

CONVERSIONS = """
__device__ __forceinline__ float widen(unsigned short bits) {
  return __uint_as_float((unsigned int)bits << 16);
}
__device__ __forceinline__ unsigned short narrow(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
"""

_PRELUDE = (
    CONVERSIONS
    + """
__device__ __forceinline__ float rounded(float x) { return widen(narrow(x)); }
__device__ __forceinline__ float silu_backward(float dy, float x) {
  const float s = 1.f / (1.f + expf(-x));
  return dy * s * (1.f + x * (1.f - s));
}
__device__ __forceinline__ float gelu_backward(float dy, float x) {
  const float cdf = 0.5f * (1.f + erff(x * 0.70710678118654752440f));
  const float pdf = expf(-0.5f * x * x) * 0.39894228040143267794f;
  return dy * (cdf + x * pdf);
}
"""
)


@dataclass(frozen=True)
class Place:
    """How an operand lies under the elements of the result, in the order of its memory."""

    # "wide": one for one; "row": one per row; "column": the same row again and again; "channel":
    # one per channel, again and again; "strided": by the digits of the position, the last of which
    # are vectors.
    kind: str
    extent: int  # elements of a row, of the operand, of a channel, or of the result
    num_channels: int = 1
    digits: tuple[tuple[int, int], ...] = ()  # size and stride, from the outermost


def place_of(
    value: torch.Tensor, shape: Sequence[int], order: Sequence[int], device: torch.device
) -> Place | None:
    """How a tensor is spread over a result of this shape, whose dimensions lie in memory in this
    order; None where a thread's share of it would not be a vector, or one number."""
    if value.dtype not in TYPES or value.device != device or value.dim() > len(shape):
        return None
    if value.storage_offset() % _VECTOR:
        return None
    missing = len(shape) - value.dim()
    sizes = (1,) * missing + tuple(value.shape)
    steps = (0,) * missing + value.stride()
    digits: list[tuple[int, int]] = []
    for d in order:
        if shape[d] == 1:
            continue
        if sizes[d] not in (1, shape[d]):
            return None
        step = 0 if sizes[d] == 1 else steps[d]
        if digits and digits[-1][1] == step * shape[d]:
            digits[-1] = (digits[-1][0] * shape[d], step)
        else:
            digits.append((shape[d], step))
    return _place_by(tuple(digits), math.prod(shape))


def _place_by(digits: tuple[tuple[int, int], ...], numel: int) -> Place | None:
    match digits:
        case ((_, 1),) if numel % _VECTOR == 0:
            return Place("wide", numel)
        case ((_, 1), (row, 0)) if row % _VECTOR == 0:
            return Place("row", row)
        case ((_, 0), (column, 1)) if column % _VECTOR == 0:
            return Place("column", column)
        case ((_, 0), (num, 1), (extent, 0)) if extent % _VECTOR == 0:
            return Place("channel", extent, num)
        case (*outer, (last, 1)) if last % _VECTOR == 0 and 1 <= len(outer) <= 3:
            if all(step % _VECTOR == 0 for _, step in outer):
                return Place("strided", numel, digits=digits)
    return None


@dataclass(frozen=True)
class Step:
    """One op of a fused kernel."""

    target: Any
    args: tuple[Any, ...]  # ("leaf", i), ("step", j), or a constant
    kwargs: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    is_view: bool


class Kernel:
    """An expression of its operands: run as the separate ops, or as one kernel."""

    def __init__(
        self,
        steps: Sequence[Step],
        places: Sequence[Place],
        dtypes: Sequence[torch.dtype],
        shape: Sequence[int],
        stride: Sequence[int],
    ) -> None:
        self.steps, self.places, self.dtypes = tuple(steps), tuple(places), tuple(dtypes)
        self.shape, self.stride, self.dtype = tuple(shape), tuple(stride), steps[-1].dtype
        vectors = [p.kind in ("wide", "column", "strided") for p in places]
        widths = [d.itemsize for d, v in zip(dtypes, vectors, strict=True) if v]
        # 16 bytes is the widest load of a thread; the widest operand sets how many elements that
        # is.
        self.at_once = 16 // max([*widths, self.dtype.itemsize])
        names = [str(s.target).split(".")[1] for s in steps if not s.is_view]
        # Equal kernels have equal names, in every process: measurements are kept under them.
        record = repr((self.steps, self.places, self.dtypes, self.shape, self.stride))
        digest = hashlib.sha256(record.encode()).hexdigest()[:8]
        self.name = "fused_" + "_".join(dict.fromkeys(names)) + "_" + digest
        self.num_vectors = math.prod(self.shape) // self.at_once
        self.num_blocks = -(-self.num_vectors // CudaKernel.num_threads)
        self.launch: CudaKernel | None = None

    def separately(self, *operands: torch.Tensor, num_parts: int = 1) -> torch.Tensor:
        """By the ops themselves; `num_parts`: on operands of a part (`parts_of`)."""
        made: list[torch.Tensor] = []

        def filled(arg: Any) -> Any:
            if isinstance(arg, tuple) and len(arg) == 2 and arg[0] in ("leaf", "step"):
                return (operands if arg[0] == "leaf" else made)[arg[1]]
            return [arg[0] // num_parts, *arg[1:]] if isinstance(arg, tuple) else arg

        for step in self.steps:
            made.append(step.target(*map(filled, step.args), **dict(step.kwargs)))  # noqa: PERF401
        return made[-1]

    def is_cut(self, k: int, shape: Sequence[int]) -> bool:
        """Whether the first dimension of this operand is the result's."""
        if self.places[k].kind == "strided":
            return len(shape) == len(self.shape) and shape[0] == self.shape[0]
        return self.places[k].kind in ("wide", "row")

    def parts_of(self, operands: Sequence[Sequence[int]], smallest: int) -> int:
        """Into how many equal parts the first dimensions of all of these can be cut: parts of at
        least so many elements, and of whole blocks of threads. 1: it cannot be cut."""
        if self.stride[0] != max(self.stride):
            return 1
        cut = [shape for k, shape in enumerate(operands) if self.is_cut(k, shape)]
        numel = math.prod(self.shape)
        views = [s.args[1] for s in self.steps if s.is_view and len(s.args) > 1]
        firsts = [v[0] if v[0] != -1 else numel // math.prod(v[1:]) for v in views]
        # Every operand that is cut, and every view inside, must be cut into as many.
        most = math.gcd(*[shape[0] for shape in (self.shape, *cut)], *firsts)
        for num in range(most, 1, -1):
            threads, rest = divmod(self.num_vectors, num)
            whole = rest == 0 and threads % CudaKernel.num_threads == 0
            if most % num == 0 and whole and threads * self.at_once >= smallest:
                return num
        return 1

    def part(self, *operands: torch.Tensor, num_parts: int) -> torch.Tensor:
        """By the kernel, on the operands of a part."""
        assert self.launch is not None
        shape = (self.shape[0] // num_parts, *self.shape[1:])
        out = torch.empty_strided(shape, self.stride, dtype=self.dtype, device=operands[0].device)
        addresses = [o.data_ptr() for o in (*operands, out)]
        self.launch(self.num_blocks // num_parts, addresses)
        return out

    def __call__(self, *operands: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.launch is not None:
            addresses = [o.data_ptr() for o in operands]
            bits = 0
            for address in addresses:
                bits |= address
            if bits % 16 == 0:  # vectors are read
                if out is None:
                    device = operands[0].device
                    out = torch.empty_strided(
                        self.shape, self.stride, dtype=self.dtype, device=device
                    )
                addresses.append(out.data_ptr())
                self.launch(self.num_blocks, addresses)
                return out
        made = self.separately(*operands)
        return made if out is None else out.copy_(made)

    # ---- source

    def source(self) -> str:
        n = self.at_once
        pointers = [f"const {TYPES[d]}* p{i}" for i, d in enumerate(self.dtypes)]
        lines = [_PRELUDE]
        for dtype, name in TYPES.items():
            size = n * dtype.itemsize
            lines.append(f"struct __align__({size}) V{dtype.itemsize} {{ {name} v[{n}]; }};")
        head = ", ".join([*pointers, f"{TYPES[self.dtype]}* out"])
        lines.append(f'extern "C" __global__ void {self.name}({head}) {{')
        lines.append("  const long long t = blockIdx.x * (long long)blockDim.x + threadIdx.x;")
        lines.append(f"  if (t >= {self.num_vectors}LL) return;")
        lines.append(f"  const long long i = t * {n};")
        for k, (place, dtype) in enumerate(zip(self.places, self.dtypes, strict=True)):
            if place.kind == "row":
                lines.append(f"  const {TYPES[dtype]} r{k} = p{k}[i / {place.extent}LL];")
                continue
            if place.kind == "channel":
                if place.extent % n == 0:  # all of a vector in one
                    lines.append(
                        f"  const {TYPES[dtype]} r{k} = p{k}[{self._channel(place, 'i')}];"
                    )
                continue
            at = {"wide": "i", "column": f"(i % {place.extent}LL)"}.get(place.kind)
            at = at or self._digits(place)
            vector = f"V{dtype.itemsize}"
            lines.append(f"  const {vector} a{k} = *(const {vector}*)(p{k} + {at});")
        lines.append(f"  V{self.dtype.itemsize} result;")
        lines.append(f"  #pragma unroll\n  for (int k = 0; k < {n}; ++k) {{")
        for k, (place, dtype) in enumerate(zip(self.places, self.dtypes, strict=True)):
            value = f"r{k}" if place.kind in ("row", "channel") else f"a{k}.v[k]"
            if place.kind == "channel" and place.extent % n:
                value = f"p{k}[{self._channel(place, 'i + k')}]"
            wide = f"widen({value})" if dtype == torch.bfloat16 else f"(float){value}"
            lines.append(f"    const float x{k} = {wide};")
        for j, step in enumerate(self.steps):
            lines.append(f"    const float s{j} = {_expression(step)};")
        last = f"s{len(self.steps) - 1}"
        stored = f"narrow({last})" if self.dtype == torch.bfloat16 else last
        lines.append(f"    result.v[k] = {stored};\n  }}")
        lines.append(f"  *(V{self.dtype.itemsize}*)(out + i) = result;\n}}")
        return "\n".join(lines)

    def _digits(self, place: Place) -> str:
        small = math.prod(self.shape) < 2**31
        number, end = ("(unsigned int)i", "u") if small else ("i", "LL")
        terms = []
        below = 1
        for k, (size, step) in reversed(list(enumerate(place.digits))):
            if step:
                digit = number if below == 1 else f"{number} / {below}{end}"
                terms.append(f"({digit}{f' % {size}{end}' if k else ''}) * {step}LL")
            below *= size
        return f"({' + '.join(terms)})"

    def _channel(self, place: Place, at: str) -> str:
        small = math.prod(self.shape) < 2**31
        number, end = ("(unsigned int)", "u") if small else ("", "LL")
        return f"{number}({at}) / {place.extent}{end} % {place.num_channels}{end}"


def _expression(step: Step) -> str:
    def operand(arg: Any) -> str:
        if isinstance(arg, tuple):
            return f"{'x' if arg[0] == 'leaf' else 's'}{arg[1]}"
        return _constant(float(arg))

    def rounded(text: str) -> str:
        return f"rounded({text})" if step.dtype == torch.bfloat16 else f"({text})"

    if step.is_view:
        return operand(step.args[0])
    # Rounded to the op's dtype after every product, as the kernel of pow does.
    if step.target is aten.pow.Tensor_Scalar:
        x = operand(step.args[0])
        square = rounded(f"__fmul_rn({x}, {x})")
        return square if step.args[1] == 2 else rounded(f"__fmul_rn({square}, {x})")
    if step.target in (aten.div.Tensor, aten.div.Scalar):
        x, by = step.args
        if isinstance(by, tuple):
            return rounded(f"__fdiv_rn({operand(x)}, {operand(by)})")
        # By a number of Python's the kernel multiplies with its inverse.
        inverse = struct.unpack("f", struct.pack("f", 1.0))[0] / _single(float(by))
        return rounded(f"__fmul_rn({operand(x)}, {_constant(inverse)})")
    operands = [operand(a) for a in step.args]
    if step.target is aten.tanh_backward.default:
        grad, y = operands
        if step.dtype == torch.float32:
            return f"({grad} * (1.f - {y} * {y}))"
        # This kernel computes in bfloat16 itself.
        return rounded(f"{grad} * rounded(1.f - rounded({y} * {y}))")
    return rounded(SOURCE[step.target](*operands))


def _single(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _constant(x: float) -> str:
    return f"__int_as_float(0x{struct.unpack('I', struct.pack('f', x))[0]:08x})"
