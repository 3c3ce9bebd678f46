"""Host memory that values are moved to: one account per device, for all managed modules.

A step leases one piece of memory, which is its own until its backward is over. Steps that do not
overlap, of whichever module, have the same piece one after the other; only a step that begins while
another is alive needs a second one. A piece is as large as the plan says, to the byte (torch's own
pinned memory comes in powers of two), and is freed when no plan is left that needs it.
"""

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from rekindle.errors import HostMemoryFull
from rekindle.profile.pinned_memory import pinned_bytes
from rekindle.runtime.transfer_lanes import CudaLanes
from rekindle.torch_compat import outside_modes

log = logging.getLogger("rekindle")


class Piece:
    """One piece of host memory, pinned where the device is a GPU."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.free: Any = None  # the point at which the last step's fetches are done
        with outside_modes():  # it is no step's memory
            if device.type != "cuda":
                self.data = torch.empty(num_bytes, dtype=torch.uint8)
                return
            self.data, unpin, code = pinned_bytes(num_bytes, device)
        if code:
            log.warning(
                "%d bytes of host memory cannot be pinned (CUDA error %d): values move slowly, and "
                "the step waits for them; give offload a smaller host budget",
                *(num_bytes, code),
            )
        # Keeps the data until the driver has let go of it.
        weakref.finalize(self, _unpin, unpin, device)


def _unpin(unpin: Callable[[], None], device: torch.device) -> None:
    CudaLanes.finish(device)
    unpin()


class HostMemory:
    """The pieces of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.idle: list[Piece] = []  # that no step has
        self.leased_bytes = 0  # of pieces that steps have
        self._needs: dict[int, int] = {}  # per plan that is alive: the bytes of its steps
        self._number = 0
        self._lock = threading.RLock()  # finalizers may run at any allocation

    @property
    def num_bytes(self) -> int:
        """Of all pieces."""
        return self.leased_bytes + sum(piece.num_bytes for piece in self.idle)

    def register(self, plan: Any, num_bytes: int) -> None:
        """Steps of this plan will lease so much, as long as it lives."""
        with self._lock:
            self._number += 1
            self._needs[self._number] = num_bytes
            weakref.finalize(plan, self._forget, self._number).atexit = False

    def _forget(self, number: int) -> None:
        with self._lock:
            del self._needs[number]
            self._trim()

    def _trim(self) -> None:
        """No piece stays that is larger than what any plan needs."""
        most = max(self._needs.values(), default=0)
        self.idle = [piece for piece in self.idle if piece.num_bytes <= most]

    def lease(self, num_bytes: int, limit_bytes: int | None) -> Piece:
        """A piece for one step. Raises HostMemoryFull where it would be beyond the limit."""
        with self._lock:
            fitting = [p for p in self.idle if p.num_bytes >= num_bytes]
            if fitting:
                piece = min(fitting, key=lambda p: p.num_bytes)
                self.idle.remove(piece)
            else:
                self.idle.clear()  # too small for this plan, while the new one fits the others
                total = self.leased_bytes + num_bytes
                if limit_bytes is not None and total > limit_bytes:
                    raise HostMemoryFull(
                        f"a step needs {num_bytes:,} bytes in host memory, steps whose backward "
                        f"has not run have {self.leased_bytes:,}, and {limit_bytes:,} are "
                        "allowed; run their backward first, drop their outputs, or give offload a "
                        "larger host budget"
                    )
                piece = Piece(num_bytes, self.device)
            self.leased_bytes += piece.num_bytes
            return piece

    def give_back(self, piece: Piece) -> None:
        with self._lock:
            self.leased_bytes -= piece.num_bytes
            self.idle.append(piece)
            self._trim()


_memories: dict[torch.device, HostMemory] = {}


def host_memory(device: torch.device) -> HostMemory:
    """That of a device; there is one."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _memories.setdefault(device, HostMemory(device))
