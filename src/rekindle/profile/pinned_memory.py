"""Host memory that a GPU can copy from and to by itself, to the byte.

torch's own pinned memory comes in powers of two, and stays with torch."""

import contextlib
from collections.abc import Callable

import torch

_nothing: Callable[[], None] = lambda: None  # noqa: E731 - what is not pinned need not be unpinned


def pinned_bytes(
    num_bytes: int, device: torch.device
) -> tuple[torch.Tensor, Callable[[], None], int]:
    """So many bytes; what lets the driver go of them, before which they must not be freed; and the
    driver's error where they could not be pinned, or 0."""
    data = torch.ByteTensor(num_bytes)  # bytes to copy, never an argument of an op
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(data.data_ptr(), num_bytes, 0))
    if code:
        return data, _nothing, code

    def unpin() -> None:
        # At the interpreter's end the driver may be gone already, and with it the pin.
        with contextlib.suppress(RuntimeError):
            runtime.cudaHostUnregister(data.data_ptr())

    return data, unpin, 0
