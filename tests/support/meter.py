"""Live bytes, counted storage by storage as dispatched ops make them and Python drops them."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.profile import blocks_of

SEED_BYTES = 64


class LiveMeter(TorchDispatchMode):
    """Counts every storage that an op makes while the mode is on, until that storage is gone.
    What was there before is resident: name it in `resident`."""

    supports_higher_order_operators = True

    def __init__(self, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.peak_op = ""
        resident = list(resident)
        self._known: dict[int, weakref.finalize | None] = {
            t.untyped_storage()._cdata: None for t in resident
        }
        # What the device's allocator takes for each storage: a GPU's rounds up. Small seeds that
        # GPU kernels leave in host memory count as the GPU's: that is how fake tensors see them.
        kinds = {t.device.type for t in resident}
        self._on_gpu = "cuda" in kinds
        self._blocks = blocks_of("cuda" if self._on_gpu else "cpu")
        self._paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            for leaf in pytree.tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._count(leaf, func)
        return out

    def _count(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        on_host = tensor.device.type == "cpu" and self._on_gpu
        if on_host and storage.nbytes() > SEED_BYTES:
            return  # such as the copy of a gradient that the first steps keep to be repeated from
        size = self._blocks.block_bytes(storage.nbytes())
        self._known[key] = weakref.finalize(storage, self._gone, key, size)
        self.live += size
        if self.live > self.peak:
            self.peak, self.peak_op = self.live, str(func)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made in here is not counted."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False


class Seed(torch.autograd.Function):
    """A loss of no memory of its own: its backward makes one fresh gradient for each input, owned
    by autograd alone, as a caller's real loss would hand it over."""

    @staticmethod
    def forward(ctx, *roots: Tensor) -> Tensor:
        # Dense in the layout of the output where that is dense, as losses give it.
        strides = [torch.empty_like(r, device="meta").stride() for r in roots]
        ctx.shapes = [(r.shape, s, r.dtype, r.device) for r, s in zip(roots, strides, strict=True)]
        return torch.zeros((), device=roots[0].device)

    @staticmethod
    def backward(ctx, _: Tensor) -> Any:
        fresh = []
        for shape, stride, dtype, device in ctx.shapes:
            fresh.append(torch.empty_strided(shape, stride, dtype=dtype, device=device))
            fresh[-1].fill_(0.5)
        return tuple(fresh)


def own_loss(output: Any) -> list[Tensor]:
    return [output.loss]


def every_output(output: Any) -> list[Tensor]:
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return list({id(t): t for t in leaves}.values())


def resident_of(model: nn.Module, inputs: Any) -> list[Tensor]:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    given = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    return [*model.parameters(), *model.buffers(), *grads, *given]


def measure_step(
    call: nn.Module,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    roots: Callable[[Any], list[Tensor]] = every_output,
    on_host: Iterable[Tensor] = (),
) -> LiveMeter:
    """One forward and backward; the caller keeps the outputs to the end, as callers do. `on_host`
    is what stands for host memory."""
    args, kwargs = inputs
    meter = LiveMeter([*resident_of(call, inputs), *on_host])
    start = torch.ones((), device=next(call.parameters()).device)
    with meter:
        output = call(*args, **kwargs)
        with meter.paused():
            total = Seed.apply(*roots(output))
        total.backward(start)
    del output, total
    return meter
