"""Batch norm and dropout taken apart, so that what they make is cheap to recompute.

Eager's batch norm reads its input twice, for the statistics and for the output; recomputed for the
backward it would cost the same once more, though its statistics are known. Where a ReLU or a sum
reads the output, and nothing else does, it is taken apart: the op itself runs as before, for its
statistics alone, and `rekindle::batch_norm_apply` makes the output from them. `elementwise_fusion`
then makes one kernel of that and what follows, which takes the place of what followed: the step
keeps its cost, and making the activation again costs one pass.

Dropout is its mask and a product in the same way: where a sum reads the output, or an elementwise
op makes the input. The op runs for its mask alone, on any tensor of that shape; the product with
the mask is what its own gradient is, `native_dropout_backward`.

Exact means bitwise identical: which of the forms below a kernel of batch norm computes, and whether
dropout is that product, is found out by running them, on the device, batch norm on the shapes of
the model; where it is not so, nothing is taken apart. What is done in place to the output, or to
the sum that reads it, becomes an op with an output of its own; whether that is then written over
its argument is the schedule's to say.

An apply or product that `elementwise_fusion` finds no partner for would be a pass for nothing: it
is put back (`put_back`), and who read it reads the op's own output again.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import NO_STORAGE, facts, set_facts
from rekindle.rewrite.graph_edit import OUT_OF_PLACE, GraphEdit, SplitOp
from rekindle.torch_compat import CudaKernel

aten = torch.ops.aten

_NORMS = (
    aten.cudnn_batch_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
)

# --- the forms in which kernels apply the statistics --------------------------------------------

# Name -> CUDA source, of the input, mean, inverse deviation, weight and bias.
FORMS: dict[str, str] = {
    "centred": "__fmaf_rn(__fmul_rn({3}, __fsub_rn({0}, {1})), {2}, {4})",
    "linear": "__fmaf_rn({0}, __fmul_rn({2}, {3}), "
    "__fsub_rn({4}, __fmul_rn({1}, __fmul_rn({2}, {3}))))",
    "chained": "__fmaf_rn({0}, __fmul_rn({2}, {3}), __fmaf_rn(-{1}, __fmul_rn({2}, {3}), {4}))",
}

_library = torch.library.Library("rekindle", "FRAGMENT")


def _apply(
    form: str,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    if x.is_cuda:
        return _launch(form, x, mean, scale, weight, bias)
    shape = (1, -1, *[1] * (x.dim() - 2))
    m, r, w, b = (t.view(shape) for t in (mean, scale, weight, bias))
    if form == "centred":
        return _fma(w * (x - m), r, b)
    if form == "linear":
        return _fma(x, r * w, b - m * (r * w))
    return _fma(x, r * w, _fma(-m, r * w, b))


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Rounded once, but for sums that lie in the middle of two numbers to 53 bits."""
    return (a.double() * b.double() + c.double()).float()


def _launch(form: str, x: torch.Tensor, *channels: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    addresses = [t.data_ptr() for t in (x, *channels, out)]
    num, extent = x.numel(), math.prod(x.shape[2:])
    kernel = _kernel(form, x.device)
    kernel(-(-num // kernel.num_threads), [*addresses, num, extent, x.shape[1]])
    return out


@functools.cache
def _kernel(form: str, device: torch.device) -> CudaKernel:
    names = ("x", "m", "r", "w", "b")
    pointers = ", ".join(f"const float* p{n}" for n in names)
    expression = FORMS[form].format("px[i]", *[f"p{n}[c]" for n in names[1:]])
    source = f"""
extern "C" __global__ void apply_{form}(
    {pointers}, float* out, long long num, long long extent, long long num_channels) {{
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= num) return;
  const long long c = i / extent % num_channels;
  out[i] = {expression};
}}"""
    return CudaKernel(source, f"apply_{form}", device)


def _define(form: str) -> Any:
    name = f"batch_norm_apply.{form}"
    _library.define(
        f"{name}(Tensor x, Tensor mean, Tensor scale, Tensor weight, Tensor bias) -> Tensor"
    )
    _library.impl(name, functools.partial(_apply, form), "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"rekindle::{name}", lambda x, *_channels: torch.empty_like(x), lib=_library
    )
    return getattr(torch.ops.rekindle.batch_norm_apply, form)


APPLY: dict[Any, Callable[..., str]] = {
    _define(form): source.format for form, source in FORMS.items()
}


# --- taking apart -------------------------------------------------------------------------------


def split_ops(edit: GraphEdit) -> None:
    """Each batch norm and dropout of which that is worth it and exact."""
    left = list(edit.graph.nodes)
    num_before = len(left) + 1
    while len(left) < num_before:  # a sum that is in place no more may be what another waits for
        num_before = len(left)
        left = [node for node in left if _may_be_left(edit, node)]


def _may_be_left(edit: GraphEdit, node: fx.Node) -> bool:
    """Takes it apart, if that is possible now; whether it might be later."""
    if node.target in _NORMS and node.args[5] is True:
        return not _batch_norm(edit, node)
    if node.target is aten.native_dropout.default and node.args[2] is True:
        return not _dropout(edit, node)
    return False


def put_back(edit: GraphEdit, node: fx.Node) -> None:
    """An apply or product that stands alone: as it was."""
    split = edit.split.pop(node)
    split.op.args = split.args
    node.target, node.args = operator.getitem, (split.op, 0)
    # No output of the op.
    set_facts(split.unread, replace(facts(split.unread), storage=NO_STORAGE))


def _batch_norm(edit: GraphEdit, norm: fx.Node) -> bool:
    # cuDNN's has a fourth output, its reserve, which the backward reads from the op as before.
    parts = {u.args[1]: u for u in norm.users if u.target is operator.getitem}
    x, weight, bias = norm.args[:3]
    if not {0, 1, 2} <= set(parts) or not all(isinstance(a, fx.Node) for a in (x, weight, bias)):
        return False
    made = parts[0]
    channels = (parts[1], parts[2], weight, bias)
    value = facts(x).value
    if not edit.fits(value, facts(made).value) or not _have_channels(value, channels):
        return False
    writers = _writers(made)
    # Worth it only where one op follows that the output can be joined with.
    if writers is None or not (writers or _reader(edit, made)):
        return False
    target = _form_of(norm, value)
    if target is None:  # no form rounds as this device's kernel does
        return False
    split = SplitOp(norm, norm.args, edit.unread(norm, made))
    # Beside the other outputs: the place of one, should it be put back.
    if writers:
        with edit.graph.inserting_after(max(parts.values())):
            apply = edit.graph.call_function(target, (x, *channels))
        edit.out_of_place(made, apply, writers)
    else:
        _free_reader(edit, made)
        max(parts.values()).append(made)
        apply = made
        apply.target, apply.args = target, (x, *channels)
    edit.split[apply] = split
    return True


def _have_channels(value: torch.Tensor, channels: Sequence[fx.Node]) -> bool:
    return (
        value.dtype == torch.float32
        and value.dim() > 2
        and all(
            facts(n).value.dtype == torch.float32
            and facts(n).value.is_contiguous()
            and facts(n).value.numel() == value.shape[1]
            for n in channels
        )
    )


def _writers(made: fx.Node) -> list[fx.Node] | None:
    """The ops that write to the output before anyone reads it; None where others write to it."""
    storage = facts(made).storage
    touching: set[fx.Node] = set()
    stack = [made]
    while stack:
        for user in stack.pop().users:
            if user not in touching:
                touching.add(user)
                stack += [user] if facts(user).storage == storage else []
    chain: list[fx.Node] = []
    is_read = False
    for node in sorted(touching):
        if not any(facts(w).storage == storage for w in facts(node).writes):
            is_read = True
            continue
        known = node.target in OUT_OF_PLACE and not node.kwargs and node.args[0] is made
        if is_read or not known or made in node.args[1:] or not _same_shape(node):
            return None
        chain.append(node)
    return chain


def _same_shape(node: fx.Node) -> bool:
    values = [facts(a).value for a in node.all_input_nodes]
    return len(values) == len(node.args) and all(
        v.shape == values[0].shape and v.dtype == values[0].dtype for v in values
    )


def _readers(node: fx.Node) -> list[fx.Node]:
    """The ops of the forward that read it; what autograd keeps of it for the backward is none."""
    return [u for u in node.users if u.target is not aten.detach.default or _readers(u)]


def _reader(edit: GraphEdit, made: fx.Node) -> fx.Node | None:
    """The one op that reads it, where that keeps only its result for the backward, is of the same
    size, and nothing is done to its result that could not have an output of its own."""
    readers = _readers(made)
    if len(readers) != 1:
        return None
    (reader,) = readers
    if reader.target not in OUT_OF_PLACE.values() or reader.kwargs or not _same_shape(reader):
        return None
    values = [facts(n).value for n in (reader, *reader.all_input_nodes)]
    return reader if edit.fits(*values) and _writers(reader) is not None else None


def _free_reader(edit: GraphEdit, made: fx.Node) -> None:
    """What is done in place to the sum that reads it gets outputs of its own."""
    reader = _reader(edit, made)
    writers = _writers(reader) if reader is not None else None
    if reader is not None and writers:
        with edit.graph.inserting_before(reader):
            before = edit.graph.call_function(reader.target, reader.args)
        edit.out_of_place(reader, before, writers)


_NUM_CHANNELS = 512  # that are tried: two forms may agree on a few by luck


@functools.cache
def _form(target: Any, shape: tuple[int, ...], device: torch.device, eps: float) -> Any:
    """The form that is bitwise identical to this op, or None."""
    forms = list(APPLY)
    try:
        # On the model's own shape: cuDNN chooses among kernels by it.
        for seed in range(-(-_NUM_CHANNELS // shape[1])):
            x, weight, bias = _numbers(shape, seed, device)
            out, mean, scale, *_ = target(x, weight, bias, None, None, True, 0.1, eps)
            forms = [f for f in forms if torch.equal(out, f(x, mean, scale, weight, bias))]
    except RuntimeError:  # no compiler, or no memory to try
        return None
    return forms[0] if forms else None


def _numbers(shape: tuple[int, ...], seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """An input of which each channel has its own scale and mean, and a weight and a bias."""
    num = shape[1]
    generator = torch.Generator(device).manual_seed(seed)
    x, scale, offset, weight, bias = (
        torch.randn(s, generator=generator, device=device)
        for s in (shape, *[(1, num, *[1] * (len(shape) - 2))] * 2, (num,), (num,))
    )
    return x.mul_(scale).add_(offset), weight, bias


def _form_of(norm: fx.Node, value: torch.Tensor) -> Any:
    target = norm.target
    # The same kernel under another name; this one takes running statistics that are not there.
    if target is aten._native_batch_norm_legit.default:
        target = aten.native_batch_norm.default
    return _form(target, tuple(value.shape), value.device, float(norm.args[7]))


def _dropout(edit: GraphEdit, dropout: fx.Node) -> bool:
    x, p, _ = dropout.args
    parts = {u.args[1]: u for u in dropout.users if u.target is operator.getitem}
    if set(parts) != {0, 1} or not 0 < p < 1 or _writers(parts[0]) != []:
        return False
    made, mask = parts[0], parts[1]
    value = facts(x).value
    if not edit.fits(value, facts(made).value) or value.dtype not in _FLOATS:
        return False
    other = _made_elementwise(x, dropout)
    if not (other or _reader(edit, made)) or not _is_product(value.dtype, p, value.device):
        return False
    split = SplitOp(dropout, dropout.args, edit.unread(dropout, made))
    _free_reader(edit, made)
    max(parts.values()).append(made)
    made.target, made.args = aten.native_dropout_backward.default, (x, mask, 1.0 / (1.0 - p))
    edit.split[made] = split
    if other is not None:
        # The mask follows from the random stream and the layout, not from the numbers. Drawn for
        # what lies below, the input need not be there when the op runs.
        dropout.args = (other, p, True)
    return True


_FLOATS = (torch.float32, torch.bfloat16)
_MAKERS = (aten.relu.default, aten.gelu.default, aten.silu.default)


def _made_elementwise(x: fx.Node, reader: fx.Node) -> fx.Node | None:
    """What the input is made of by an op that only this one reads; as large as the input."""
    if x.target not in _MAKERS or _readers(x) != [reader] or x.kwargs or len(x.args) != 1:
        return None
    below = x.args[0]
    assert isinstance(below, fx.Node)
    value, wanted = facts(below).value, facts(x).value
    same = value.shape == wanted.shape and value.stride() == wanted.stride()
    return below if same and value.dtype == wanted.dtype else None


@functools.cache
def _is_product(dtype: torch.dtype, p: float, device: torch.device) -> bool:
    """Whether dropout is bitwise identical to the product with its mask."""
    # The trial draws: the user's stream goes on as if it had not.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        x = torch.randn(1 << 16, device=device).exp2_().to(dtype)
        out, mask = aten.native_dropout.default(x, p, True)
        product = aten.native_dropout_backward.default(x, mask, 1.0 / (1.0 - p))
        return bool(torch.equal(out, product))
