"""The lanes on which values move: beside the ops, one to the host and one from it.

`Moves` says what must come before what, in three words: `record` a point of a lane, let another
lane `wait` for it, `copy` bytes on a lane. On a GPU lanes are streams and points are events: the
host waits for nothing. On a CPU everything is done at once, in the order in which it is asked for.
"""

import contextlib
from typing import Any, Literal, Protocol

import torch

Lane = Literal["compute", "to_host", "from_host"]


class Lanes(Protocol):
    """What one step has of the lanes of a device. `compute` is where the ops of the step run."""

    def record(self, lane: Lane) -> Any: ...
    def wait(self, lane: Lane, point: Any) -> None: ...
    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None: ...


class NoLanes:
    """Of a device that does one thing after the other."""

    def record(self, lane: Lane) -> None:
        """Everything before it is done."""

    def wait(self, lane: Lane, point: Any) -> None:
        """There is nothing to wait for."""

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


class CudaLanes:
    """Two side streams, which all steps of a device share, and the stream that the step runs on."""

    _side: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}  # noqa: RUF012 - shared

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._side:
            self._side[index] = (torch.cuda.Stream(index), torch.cuda.Stream(index))
        to_host, from_host = self._side[index]
        self._streams: dict[Lane, torch.cuda.Stream] = {
            "compute": torch.cuda.current_stream(index),
            "to_host": to_host,
            "from_host": from_host,
        }

    def record(self, lane: Lane) -> torch.cuda.Event:
        return self._streams[lane].record_event()

    def wait(self, lane: Lane, point: torch.cuda.Event) -> None:
        self._streams[lane].wait_event(point)

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._streams[lane]):
            target.copy_(source, non_blocking=True)

    @classmethod
    def finish(cls, device: torch.device) -> None:
        """Waits, on the host, until nothing moves any more."""
        for stream in cls._side.get(device.index or 0, ()):
            # At the interpreter's end the driver may be gone already, and with it the transfers.
            with contextlib.suppress(RuntimeError):
                stream.synchronize()


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a step that begins now, on the current stream."""
    return CudaLanes(device) if device.type == "cuda" else NoLanes()
