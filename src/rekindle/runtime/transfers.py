"""What a step moves to host memory and back, on lanes of its own beside the ops.

What must come before what is all in here; the code of a step (`lower.host_steps`) says only what to
move when.

    send      after the ops so far, and after the last step's fetches from that host memory
    drop      the ops that follow wait for the send: the device copy's block may be given away
    fetch     after the send, and after the ops so far: the block may have been another's
    arrive    the ops that follow wait for the fetch
    release   sends that follow wait for the fetch: they may write over that host memory

No `record_stream`: a block that is being read is held by the step's code until its `drop`, and one
that is being written by this module until its `arrive`. A step that ends early, by an error or
because nobody wants its backward, first lets the ops that follow wait for what is still arriving.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.core import HostLayout
from rekindle.runtime.host_memory import Piece, host_memory
from rekindle.runtime.transfer_lanes import Lanes, lanes_of


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a tensor looks at its storage."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_conjugate: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Shape":
        assert not tensor.is_neg(), "a tensor that owns its storage is no negative view"
        return _Shape(
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made = made.set_(storage, self.offset, self.size, self.stride)
        return made.conj() if self.is_conjugate else made


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return made.set_(storage, 0, (storage.nbytes(),), (1,))


class Moves:
    """The transfers of one step."""

    def __init__(
        self, layout: HostLayout, piece: Piece, lanes: Lanes, on_close: Callable[[Piece], None]
    ) -> None:
        self.layout, self.piece, self.lanes = layout, piece, lanes
        self._on_close = on_close
        self._is_open = True
        self._is_fork = False
        num = len(layout.slots)
        self._host: list[Any] = [None] * num  # the bytes of a slot, where they lie
        self._shapes: list[tuple[_Shape, ...]] = [()] * num
        self._sent: list[Any] = [None] * num  # when a send is done
        self._arrived: list[Any] = [None] * num  # when the last fetch of it is
        self._sending: set[int] = set()  # slots whose send no op has waited for
        self._arriving: dict[int, torch.Tensor] = {}  # slot -> bytes that are still being written
        self._device: torch.device | None = None
        self._reuses = True  # until the first send

    # ---- what the code of a step calls

    def send(self, slot: int, *tensors: torch.Tensor) -> None:
        """Begins to copy a storage to the host, and notes how the tensors look at it."""
        storage = tensors[0].untyped_storage()
        self._device = storage.device
        self._shapes[slot] = tuple([_Shape.of(tensor) for tensor in tensors])
        self._host[slot] = host = self._place(slot, storage.nbytes())
        if self._reuses:
            self._reuses = False
            if self.piece.free is not None:
                self.lanes.wait("to_host", self.piece.free)
        self.lanes.wait("to_host", self.lanes.record("compute"))
        self.lanes.copy("to_host", host, _as_bytes(storage))
        self._sent[slot] = self.lanes.record("to_host")
        self._sending.add(slot)

    def drop(self, slot: int, *_tensors: torch.Tensor) -> None:
        """The ops that follow wait for the send; the caller's tensors then go."""
        if slot in self._sending:
            self._sending.remove(slot)
            self.lanes.wait("compute", self._sent[slot])

    def fetch(self, slot: int) -> list[torch.Tensor]:
        """Begins to copy the bytes back, into a new storage; its tensors as they were sent."""
        host, device = self._host[slot], self._device
        data = torch.empty(host.numel(), dtype=torch.uint8, device=device)
        self.lanes.wait("from_host", self.lanes.record("compute"))
        self.lanes.wait("from_host", self._sent[slot])
        self.lanes.copy("from_host", data, host)
        self._arrived[slot] = self.lanes.record("from_host")
        self._arriving[slot] = data
        storage = data.untyped_storage()
        return [shape.over(storage) for shape in self._shapes[slot]]

    def arrive(self, slot: int) -> None:
        """The ops that follow wait for the fetch."""
        if self._arriving.pop(slot, None) is not None:
            self.lanes.wait("compute", self._arrived[slot])

    def release(self, slot: int) -> None:
        """Sends that follow may write over the bytes, when the last fetch has read them."""
        if self._arrived[slot] is not None:
            self.lanes.wait("to_host", self._arrived[slot])

    # ---- the step

    def _place(self, slot: int, num_bytes: int) -> torch.Tensor:
        if self._is_fork:
            return torch.empty(num_bytes, dtype=torch.uint8)
        place = self.layout.slots[slot]
        if num_bytes > place.num_bytes:
            raise RuntimeError(
                f"a value of {num_bytes:,} bytes is to be moved to {place.num_bytes:,} bytes of "
                "host memory: an op has made more than it made when it was planned; plan again"
            )
        return self.piece.data[place.offset : place.offset + num_bytes]

    def settle(self) -> None:
        """The ops that follow may write to everything: they wait for all that moves."""
        for slot in list(self._sending):
            self.drop(slot)
        for slot in list(self._arriving):
            self.arrive(slot)

    def fork(self) -> "Moves":
        """For a backward that leaves everything as it finds it: what it sends goes elsewhere."""
        self.settle()
        other = Moves(self.layout, self.piece, self.lanes, _keep)
        other._is_fork, other._reuses, other._device = True, False, self._device
        for name in ("_host", "_shapes", "_sent", "_arrived"):
            setattr(other, name, list(getattr(self, name)))
        return other

    def bring_back(self, slots: Iterable[int]) -> list[torch.Tensor]:
        """The tensors of these slots, which may be read at once."""
        found = []
        for slot in slots:
            found += self.fetch(slot)
            self.arrive(slot)
        return found

    def close(self) -> None:
        """The step is over: its host memory is another's from here on."""
        if not self._is_open:
            return
        self._is_open = False
        self.settle()
        if not self._is_fork:
            # Fetches run in order, so this point is behind all of them, those of forks too.
            if any(host is not None for host in self._host):
                self.piece.free = self.lanes.record("from_host")
            self._on_close(self.piece)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


def _keep(_piece: Piece) -> None:
    """A fork leaves the piece to the step that has it."""


class Transfers:
    """Of one plan: gives each of its steps host memory."""

    def __init__(
        self, layout: HostLayout, device: torch.device, limit_bytes: int | None = None
    ) -> None:
        self.layout, self.device, self.limit_bytes = layout, device, limit_bytes
        self._memory = host_memory(device)
        self._memory.register(self, layout.num_bytes)

    def begin(self) -> Moves:
        """For a step that begins now. Raises HostMemoryFull."""
        piece = self._memory.lease(self.layout.num_bytes, self.limit_bytes)
        return Moves(self.layout, piece, lanes_of(self.device), self._memory.give_back)
