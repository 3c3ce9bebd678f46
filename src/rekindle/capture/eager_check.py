"""Eager as the judge: where a capture fails, whether the model itself is at fault; where it took
the second route, whether its forward is eager's.

The model runs once, for real, on copies of its buffers and arguments. What autograd would save for
a backward is not kept, so the run needs no more memory than one under no_grad, and takes the
branches and kernels of training all the same.
"""

import traceback
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.capture.module_state import left_as_it_was
from rekindle.capture.node_facts import source_of
from rekindle.capture.pytrees import split
from rekindle.capture.recorder import FOREIGN, Recorder
from rekindle.capture.sample import Sample
from rekindle.capture.subgraph import run_slice
from rekindle.errors import CaptureError
from rekindle.torch_compat import eager_kernels, outside_modes


def explained(error: Exception) -> str:
    """The sentence of a capture that failed: what was raised, where, and what to try."""
    if isinstance(error, CaptureError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    inner = next((f for f in reversed(frames) if not f.filename.startswith(FOREIGN)), frames[-1])
    text = " ".join(str(error).split())[:300]
    return (
        f"the model cannot run on fake tensors: {type(error).__name__} in {inner.name} "
        f"({inner.filename}:{inner.lineno}): {text}; manage the submodules around it one by one"
    )


@dataclass(frozen=True, slots=True)
class Eager:
    """What a forward of the model itself gave and left."""

    out: Any
    buffers: dict[str, torch.Tensor]
    streams: list[torch.Tensor]


def run_eagerly(sample: Sample) -> Eager:
    """The model's own forward on copies of the sample: what it returns, and what it leaves in
    buffers and random number generators."""
    copies = {id(b): b.clone() for b in sample.buffers.values()}
    for t in sample.tensors:
        copies.setdefault(id(t), t.detach().clone().requires_grad_(t.requires_grad))
    args, kwargs = sample.structure.rebuild([copies[id(t)] for t in sample.tensors])

    def forget(_tensor: torch.Tensor) -> None:
        return None

    def missing(_nothing: None) -> Any:
        raise RuntimeError("nothing was kept for a backward")

    with (
        torch.random.fork_rng(_devices(sample)),
        left_as_it_was(sample.model, copies),
        torch.autograd.graph.saved_tensors_hooks(forget, missing),
    ):
        out = sample.call(sample.model, *args, **kwargs)
        return Eager(out, dict(sample.model.named_buffers()), _streams(sample))


def difference(
    eager: Eager,
    sample: Sample,
    recorder: Recorder,
    out: Any,
    attributes: dict[tuple[str, str], torch.Tensor],
) -> str | None:
    """None where the recorded forward is bitwise identical to eager's; else what differs."""
    tensors, structure = split(out)
    eager_tensors, eager_structure = split(eager.out)
    if structure.key != eager_structure.key:
        return "it returns something else than in eager"
    wanted = [recorder.node_of(t) for t in tensors]
    replaced = {f"{path}.{name}".lstrip("."): t for (path, name), t in attributes.items()}
    for node in recorder.reals:
        source = source_of(node)
        if source.kind == "buffer":
            new = replaced.get(source.name)
            wanted.append(node if new is None else recorder.node_of(new))
            eager_tensors.append(eager.buffers[source.name])
    with outside_modes(), torch.random.fork_rng(_devices(sample)), eager_kernels():
        everything = list(recorder.graph.nodes)
        values = run_slice(everything, recorder.reals, wanted, keep_stream=True)
        streams = _streams(sample)
    for node, other in zip(wanted, eager_tensors, strict=True):
        if not _same(values[node], other.detach()):
            return f"its {node.name} is not eager's"
    if any(not torch.equal(a, b) for a, b in zip(streams, eager.streams, strict=True)):
        return "it draws other random numbers than in eager"
    return None


def _devices(sample: Sample) -> list[torch.device]:
    return [sample.device] if sample.device.type == "cuda" else []


def _streams(sample: Sample) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in _devices(sample))]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
