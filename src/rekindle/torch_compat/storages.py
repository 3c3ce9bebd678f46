"""Storages of tensors, and who refers to a tensor."""

import functools
import sys

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for two tensors if and only if they share a storage (while both are alive)."""
    return int(tensor.untyped_storage()._cdata)


def python_references(tensor: torch.Tensor) -> int:
    """How often Python refers to a tensor, as a number to compare with another tensor's: what C++
    holds (a view its base, a node what it saved) may count as one reference, and is left out."""
    return sys.getrefcount(tensor) - (_counts_cpp() if tensor._use_count() > 1 else 0)


@functools.cache
def _counts_cpp() -> int:
    """What all holders in C++ together add to a tensor's count of references: 0 or 1."""
    # Found by trial: how C++ holds a Python tensor is torch's own affair.
    tensor = torch.empty(0)
    alone = sys.getrefcount(tensor)
    view = tensor.view(0)
    return sys.getrefcount(tensor) - alone if view._is_view() else 0


def storage_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the storage under a tensor, which may be more than it shows; symbolic where a
    size of it is."""
    size: int = tensor.untyped_storage().nbytes()
    return size


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not keep it: valid as long as nobody else gets it."""
    storage = tensor.untyped_storage()
    # A storage over memory of another one, which it neither keeps nor frees.
    place = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        place, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
