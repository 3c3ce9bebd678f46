"""Private pools of the CUDA caching allocator."""

from collections.abc import Sequence

import torch

from rekindle.torch_compat.running import outside_modes


class MemoryPool:
    """Blocks that only those get who allocate inside of `with`, in their own thread, on the device.

    What is free in it serves the rest of the process too where the device has nothing left.
    """

    __slots__ = ("_begin", "_device", "_end", "_id", "_pool", "_release")

    def __init__(self, device_index: int) -> None:
        memory = torch.cuda.memory
        with torch.cuda.device(device_index):
            self._pool = torch.cuda.MemPool(use_on_oom=True)
        self._device, self._id = device_index, self._pool.id
        # What `torch.cuda.use_mem_pool` calls: a step enters once per part of its backward, and
        # that costs three times as much through a generator.
        self._begin = memory._cuda_beginAllocateCurrentThreadToPool
        self._end = memory._cuda_endAllocateToPool
        self._release = memory._cuda_releasePool

    def __enter__(self) -> None:
        self._begin(self._device, self._id)

    def __exit__(self, *_: object) -> None:
        self._end(self._device, self._id)
        self._release(self._device, self._id)

    def reserve(self, segments: Sequence[int]) -> None:
        """Takes segments of these sizes from the device; each is there as one free block."""
        with self, outside_modes():
            held = [
                torch.empty(size, dtype=torch.uint8, device=f"cuda:{self._device}")
                for size in segments
            ]
            del held

    def large_bytes(self) -> int:
        """Of its segments for requests above 1 MiB."""
        return sum(
            int(segment["total_size"])
            for segment in self._pool.snapshot()
            if segment["segment_type"] == "large"
        )
