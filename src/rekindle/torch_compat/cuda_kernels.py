"""CUDA kernels from source, compiled and launched by the driver."""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch


@functools.cache
def _whole_numbers(num: int) -> Any:
    return ctypes.c_uint64 * num


class CudaKernel:
    """A kernel of this source. Its arguments are addresses and whole numbers of 64 bits; blocks
    have 256 threads, or as many as are given. torch's own launch spends several times as long on
    the host."""

    num_threads = 256
    _NO_CONTEXT = 201

    def __init__(
        self, source: str, name: str, device: torch.device, num_threads: int = num_threads
    ) -> None:
        self.num_threads = num_threads
        index = device.index
        self.device: int = torch.cuda.current_device() if index is None else index
        with torch.cuda.device(self.device):
            # NVRTC, which torch brings: no compiler has to be installed.
            self._kernel = torch.cuda._compile_kernel(source, name)  # keeps the module loaded
        self._launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]

    def __call__(self, num_blocks: int, values: Sequence[int]) -> None:
        if torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                return self(num_blocks, values)
        array = _whole_numbers(len(values))
        slots = array(*values)
        first = ctypes.addressof(slots)
        # The driver wants the address of each argument: they lie 8 bytes apart.
        places = array(*range(first, first + 8 * len(values), 8))
        # On torch's stream: the caching allocator hands blocks on in the order of that stream.
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        grid = (num_blocks, 1, 1, self.num_threads, 1, 1, 0)
        error = self._launch(self._kernel.func, *grid, stream, ctypes.addressof(places), None)
        if error == self._NO_CONTEXT:  # the first that a thread does on this device
            torch._C._cuda_setDevice(self.device)
            error = self._launch(self._kernel.func, *grid, stream, ctypes.addressof(places), None)
        if error:
            raise RuntimeError(f"a kernel could not be launched: error {error} of the CUDA driver")
        return None
