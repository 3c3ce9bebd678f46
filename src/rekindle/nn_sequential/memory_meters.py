"""How many bytes a stage takes while it runs: by what Python sees, or by CUDA's own account."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from rekindle.nn_sequential.stage_values import tensors_of
from rekindle.torch_compat import TorchDispatchMode


class StorageMeter(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of the storages that appear while it is on and are still referred to."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        # Finalizers refer to the storage by its address, which stays its own while it lives.
        self._sizes: dict[int, int] = dict.fromkeys(
            (t.untyped_storage().data_ptr() for t in known), 0
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result):
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            # Views and in-place ops give back storages that are known.
            if key and key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._gone, key).atexit = False
        return result

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)

    def restart(self) -> None:
        self.peak_bytes = self.live_bytes


class AllocatorMeter:
    """The same by CUDA's caching allocator, which also sees what kernels allocate inside."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._base = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def __enter__(self) -> "AllocatorMeter":
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize(self.device)

    @property
    def live_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device) - self._base)

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device) - self._base)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
