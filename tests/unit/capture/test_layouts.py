"""Layouts at capture are those of the real kernels, whatever the layout of the arguments."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rekindle.capture import op_effects
from rekindle.capture.kernel_layouts import SURE, Layouts

C = 8


def weight(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def zeros_of(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.long)


OPS = {
    "conv2d": lambda x: F.conv2d(x, weight(4, C, 3, 3), weight(4), padding=1),
    "grouped conv2d": lambda x: F.conv2d(x, weight(C, 1, 3, 3), groups=C),
    "conv_transpose2d": lambda x: F.conv_transpose2d(x, weight(C, 4, 2, 2), stride=2),
    "batch_norm": lambda x: F.batch_norm(
        x, torch.zeros(C), torch.ones(C), weight(C), weight(C), True
    ),
    "batch_norm eval": lambda x: F.batch_norm(x, torch.zeros(C), torch.ones(C), weight(C)),
    "group_norm": lambda x: F.group_norm(x, 2, weight(C), weight(C)),
    "instance_norm": F.instance_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], weight(x.shape[-1])),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], weight(x.shape[-1])),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "prelu": lambda x: F.prelu(x, weight(C)),
    "glu": lambda x: F.glu(x, 1),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp sin cos": lambda x: x.exp() + x.sin() * x.cos(),
    "softmax": lambda x: x.softmax(1),
    "softmax of the last": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reflection pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "unfold": lambda x: F.unfold(x, 2),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 1).values,
    "amax": lambda x: x.amax((2, 3)),
    "mean": lambda x: x.mean((2, 3)),
    "var": lambda x: x.var(1),
    "norm": lambda x: F.normalize(x, dim=1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 2),
    "cat": lambda x: torch.cat([x, x.sin()], 1),
    "stack": lambda x: torch.stack([x, x.cos()], 1).flatten(1, 2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "index": lambda x: x[:, torch.tensor([0, 1, 1])],
    "index_select": lambda x: x.index_select(1, torch.tensor([0, 2])),
    "gather": lambda x: x.gather(1, zeros_of(x)),
    "scatter": lambda x: x.scatter(1, zeros_of(x), x * 2),
    "fft": lambda x: torch.fft.irfft2(torch.fft.rfft2(x)),
    "complex fft": lambda x: torch.fft.fft(x, dim=1).abs(),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "linear": lambda x: F.linear(x.permute(0, 2, 3, 1), weight(3, C), weight(3)),
    "einsum": lambda x: torch.einsum("bchw,cd->bdhw", x, weight(C, C)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x * 2, x.sin(), is_causal=True),
    "mixed sum": lambda x: x + torch.ones(x.shape).to(memory_format=torch.channels_last),
    "broadcast product": lambda x: x * weight(1, C, 1, 1),
    "cross_entropy": lambda x: F.cross_entropy(x, zeros_of(x[:, 0])),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones(x.shape)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, torch.ones(x.shape)),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(x.shape)),
    "casts": lambda x: x.bfloat16().float(),
    "clone": torch.clone,
    "embedding": lambda x: x + F.embedding(zeros_of(x[..., 0]), weight(3, x.shape[-1])),
}


class Compare(TorchDispatchMode):
    """Each op for real, and beside it as the capture would see it."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.layouts = Layouts()
        self.wrong: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with _disable_current_modes():
            like = pytree.tree_map_only(Tensor, self._fake, (args, kwargs))
        out = func(*args, **kwargs)
        if op_effects.is_random(func) or func in op_effects.SCALAR_OPS:
            return out
        with _disable_current_modes(), self.fake_mode:
            seen = self.layouts.correct(func, *like, func(*like[0], **like[1]))
        for real, fake in zip(pytree.tree_leaves(out), pytree.tree_leaves(seen), strict=True):
            if isinstance(real, Tensor) and strides(real) != strides(fake):
                given = [strides(t) for t in pytree.tree_leaves(args) if isinstance(t, Tensor)]
                self.wrong.append(f"{func} of {given}: {strides(fake)}, real {strides(real)}")
        if num_storages(out) != num_storages(seen):
            self.wrong.append(f"{func}: {num_storages(seen)} storages, real {num_storages(out)}")
        return out

    def _fake(self, t: Tensor) -> Tensor:
        return self.fake_mode.from_tensor(t.detach(), static_shapes=True)


def num_storages(nest: object) -> int:
    tensors = [t for t in pytree.tree_leaves(nest) if isinstance(t, Tensor)]
    return len({t.untyped_storage()._cdata for t in tensors})


def strides(t: Tensor) -> tuple:
    return (tuple(t.shape), tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1))


def in_layouts(shape: torch.Size) -> Iterator[Tensor]:
    """Ones in several orders of the dimensions, and as a part of something larger."""
    yield torch.ones(shape)
    if len(shape) < 2:
        return
    for turn in range(1, len(shape)):
        order = [(d + turn) % len(shape) for d in range(len(shape))]
        back = [order.index(d) for d in range(len(shape))]
        yield torch.ones([shape[d] for d in order]).permute(back)
    yield torch.ones([2 * n for n in shape])[tuple(slice(0, n) for n in shape)]
    yield torch.ones(()).expand(shape)


@pytest.mark.parametrize("name", OPS)
def test_layouts_are_the_real_ones(name: str) -> None:
    compare = Compare()
    for x in in_layouts(torch.Size((2, C, 6, 4))):
        leaf = x.detach().requires_grad_()
        with compare:
            out = OPS[name](leaf)
            for gradient in in_layouts(out.shape):
                torch.autograd.grad(out, leaf, gradient.to(out.dtype), retain_graph=True)
    assert not compare.wrong, "\n".join(compare.wrong[:5])


@pytest.mark.parametrize("batch", [1, 3])
def test_recurrent_layers_have_their_workspace(batch: int) -> None:
    """On a CPU the layer keeps what its backward needs in a buffer that fake kernels say is 0."""
    compare = Compare()
    with warnings.catch_warnings(), compare:
        warnings.simplefilter("ignore")
        out, _ = nn.LSTM(4, 8)(torch.ones(5, batch, 4))
        out.sum().backward()
    assert not compare.wrong, "\n".join(compare.wrong[:5])


def test_names_of_ops_that_are_sure_exist() -> None:
    missing = [name for name in SURE if not hasattr(torch.ops.aten, name)]
    assert not missing
