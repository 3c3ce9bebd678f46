"""What the generated code calls besides ops: copies of storages, and random ops run again."""

from typing import Any, TypeAlias

import torch


def clone_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout over a copy of the whole storage."""
    # clone keeps the strides of a dense tensor; of one with gaps, or expanded, it does not, and
    # views made later count on the storage.
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    storage = tensor.untyped_storage().clone()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


# The device's own stream, or the one that an op was given.
Stream: TypeAlias = torch.device | torch.Generator


def generator_of(stream: Stream) -> torch.Generator:
    """What draws from a stream: itself, or the default generator of a device."""
    if isinstance(stream, torch.Generator):
        return stream
    if stream.type == "cuda":
        index = stream.index if stream.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def rng_state(stream: Stream) -> torch.Tensor:
    """Where a stream is now, for `replay`."""
    return generator_of(stream).get_state()


def replay(target: Any, stream: Stream, state: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Runs a random op on an earlier state of the stream, and leaves the stream where it was,
    whatever happens."""
    generator = generator_of(stream)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        generator.set_state(now)
