"""What the generated code calls besides ops: copies of storages, and random ops run again."""

from typing import Any

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


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def rng_state(device: torch.device) -> torch.Tensor:
    """The state of a device's default generator, to be restored before an op is recomputed."""
    return generator_of(device).get_state()


def replay(
    target: Any, device: torch.device, state: torch.Tensor, /, *args: Any, **kwargs: Any
) -> Any:
    """Runs a random op on an earlier state of the stream, and leaves the stream where it was,
    whatever happens."""
    generator = generator_of(device)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return target(*args, **kwargs)
    finally:
        generator.set_state(now)
