"""One training step as it really runs: its peak by the allocator's own account, and its time.

The peak is what forward and backward add to what was resident before, on a GPU by
`max_memory_allocated`, on the CPU by the profiler's allocator events. Parameters keep their
gradients, buffers their contents and random streams their state: measuring leaves no trace.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rekindle.capture.random_streams import left_alone, reachable_generators
from rekindle.plans.options import as_args
from rekindle.profile.block_sizes import LARGE_SEGMENT
from rekindle.profile.cpu_allocator import allocator_deltas, peak_of


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Memory and time of a training step, as measured on the device."""

    peak_bytes: int  # above what was resident
    step_ns: int  # median
    resident_bytes: int  # allocated before the step; 0 where the device does not tell
    reserved_bytes: int  # what the allocator took for it, from an empty cache: whole segments
    num_steps: int
    device: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan says that a step will need."""

    peak_bytes: int
    step_ns: int
    reserved_bytes: int

    def against(self, measured: StepMeasurement) -> str:
        """Predicted and measured, side by side."""
        peak, took, held = measured.peak_bytes, measured.step_ns, measured.reserved_bytes
        return (
            f"peak predicted {self.peak_bytes:,} B, measured {peak:,} B "
            f"(ratio {_ratio(self.peak_bytes, peak)}); "
            f"reserved predicted {self.reserved_bytes:,} B, measured {held:,} B "
            f"(ratio {_ratio(self.reserved_bytes, held)}); "
            f"step predicted {self.step_ns / 1e6:.2f} ms, "
            f"measured {took / 1e6:.2f} ms (ratio {_ratio(self.step_ns, took)})"
        )


def measure_step(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    num_steps: int = 5,
    num_warmup: int = 2,
    hold_outputs: bool | None = None,
) -> StepMeasurement:
    """Runs forward and backward and measures them. Without `loss` the output's own is taken (a
    scalar, `.loss`, "loss"), else the backward starts from a gradient of ones per output. Outputs
    are held through the backward, unless the model's plan says that they are dropped, or
    `hold_outputs=False`."""
    args, kwargs = as_args(args), kwargs or {}
    device = _device_of(model, args, kwargs)
    holds = _plan_holds_outputs(model) if hold_outputs is None else hold_outputs

    def step() -> None:
        held = [model(*args, **kwargs)]
        root = _root(held[0], loss)
        if not holds:
            held.clear()
        root.backward()

    with _no_trace(model, args, kwargs, device) as clear:
        gaps = _fill_gaps(device)
        # The first steps choose kernels and fill the allocator's cache; their memory is no step's.
        for _ in range(max(1, num_warmup)):
            step()
            clear()
        resident, peak, reserved = _peak(step, clear, device)
        samples = _times(step, clear, device, max(1, num_steps))
        del gaps
    median = round(statistics.median(samples))
    return StepMeasurement(peak, median, resident, reserved, len(samples), str(device))


def _fill_gaps(device: torch.device) -> list[torch.Tensor]:
    """Takes what others left free of the segments that they share: blocks from there are handed out
    larger than asked, so that a small model's peak would follow what ran before it."""
    if device.type != "cuda":
        return []
    # Whole free segments go back; what is left are gaps in segments that are in use.
    torch.cuda.empty_cache()
    stream = torch.cuda.current_stream(device).cuda_stream
    sizes = [
        block["size"]
        for segment in _segments_in_use(device)
        if segment["stream"] == stream
        for block in segment["blocks"]
        if block["state"] == "inactive" and block["size"] <= LARGE_SEGMENT
    ]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def _segments_in_use(device: torch.device) -> list[dict[str, Any]]:
    """The allocator's segments in which something is allocated. Those of private pools, such as the
    one that planned steps have, are not when no step runs."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and segment["allocated_size"]
    ]


def _peak(
    step: Callable[[], None], clear: Callable[[], None], device: torch.device
) -> tuple[int, int, int]:
    if device.type != "cuda":
        peak = peak_of(allocator_deltas(step))
        clear()
        return 0, peak, peak
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    resident = int(torch.cuda.memory_allocated(device))
    held = sum(int(segment["total_size"]) for segment in _segments_in_use(device))
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = int(torch.cuda.max_memory_allocated(device)) - resident
    reserved = int(torch.cuda.max_memory_reserved(device)) - held
    clear()
    return resident, peak, reserved


def _times(
    step: Callable[[], None], clear: Callable[[], None], device: torch.device, num_steps: int
) -> list[float]:
    """In nanoseconds. On a GPU the steps follow each other as in training, where the host does not
    wait for the device at the end of each."""
    if device.type != "cuda":
        samples = []
        for _ in range(num_steps):
            begin = time.perf_counter_ns()
            step()
            samples.append(float(time.perf_counter_ns() - begin))
            clear()
        return samples
    stream = torch.cuda.current_stream(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    torch.cuda.synchronize(device)
    for event in events:  # the first step only fills the queue
        step()
        clear()
        event.record(stream)
    torch.cuda.synchronize(device)
    return [1e6 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def _plan_holds_outputs(model: nn.Module) -> bool:
    """What the plan of a managed model takes its caller to do; any other caller holds them."""
    return getattr(getattr(model, "plan", None), "hold_outputs", True) is not False


def _root(output: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """The scalar that the backward starts from; it holds no output that it does not read."""
    if loss is not None:
        return loss(output)
    # As the models of transformers return it: in a dict, or as an attribute.
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    tensors = [t for t in _leaves(output) if t.requires_grad]
    if len(tensors) == 1 and tensors[0].dim() == 0:
        return tensors[0]
    return _AnyLoss.apply(*tensors)


class _AnyLoss(torch.autograd.Function):  # type: ignore[misc]
    """Stands for whatever the caller makes of several outputs: its backward gives each a gradient
    in the output's layout, which nobody else holds."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        # Fake tensors: a loss that kept the outputs would keep what a plan has dropped.
        ctx.like = [(torch.empty_like(output, device="meta"), output.device) for output in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones_like(like, device=device) for like, device in ctx.like)


@contextmanager
def _no_trace(
    model: nn.Module, args: Any, kwargs: Any, device: torch.device
) -> Iterator[Callable[[], None]]:
    """Sets gradients aside, yields what clears those of a step, puts everything back."""
    leaves = [*model.parameters(), *(t for t in _leaves((args, kwargs)) if t.is_leaf)]
    # Set aside, not copied: `.grad` is the same tensor afterwards.
    kept = [(t, t.grad) for t in leaves]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]

    def clear() -> None:
        for tensor in leaves:
            tensor.grad = None

    clear()
    devices = [device] if device.type == "cuda" else []
    try:
        own = reachable_generators(model, args, kwargs)
        with torch.random.fork_rng(devices=devices), left_alone(own):
            yield clear
    finally:
        for tensor, grad in kept:
            tensor.grad = grad
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _leaves(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for v in tree.values() for t in _leaves(v)]
    if isinstance(tree, (tuple, list)):
        return [t for v in tree for t in _leaves(v)]
    return []


def _device_of(model: nn.Module, args: Any, kwargs: Any) -> torch.device:
    tensors = [*model.parameters(), *model.buffers(), *_leaves((args, kwargs))]
    return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))


def _ratio(predicted: int, measured: int) -> str:
    return f"{predicted / measured:.3f}" if measured else "-"
