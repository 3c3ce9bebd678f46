"""Segments of device memory for what planned steps allocate.

The caching allocator takes a segment from the device for each large request that no free block
serves, and blocks of two segments never become one: a step that recomputes leaves segments of many
sizes behind and reserves up to twice what it has allocated at once. Its requests are known in
advance, so the sizes of one or a few segments that serve them all are too
(`predict.caching_allocator.best_arena`). They are taken once, in a private pool that the step's
own allocations go to; the allocator splits them by its own rules.

An arena belongs to one stream of one device. All managed modules that run there share it, and it
is as large as the largest of them needs; where their steps overlap and it is too small, the pool
takes more segments, as without. The first steps of a plan run outside, so that libraries make
their handles and workspaces where they belong. Whatever does not fit (a device without room, a CUDA
graph that is being recorded, another thread inside) runs outside too, which is as before.
"""

import logging
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType

import torch

from rekindle.torch_compat import MemoryPool

log = logging.getLogger("rekindle")

NUM_WARM_STEPS = 2  # outside
NUM_CHECKED_STEPS = 3  # inside, of which each can be repeated outside if the memory runs out
_MOST_GROWTH = 1.5  # times what the model of the allocator says
_SPARE_BYTES = 64 * 2**20  # stay free on the device: small segments, and what the model misses


class Arena:
    """The pool of one stream of one device."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self.size_bytes = 0
        self._pool: MemoryPool | None = None
        self._inside = threading.Lock()
        self._growing = threading.Lock()
        self._num_leftovers = 0  # how often to look for what pools before this one still held

    def hold(self, segments: Sequence[int]) -> bool:
        """Whether there are so many bytes; segments of these sizes are taken if there are not."""
        if sum(segments) <= self.size_bytes and not self._num_leftovers:
            return True
        with self._growing:
            return self._hold(segments)

    def _hold(self, segments: Sequence[int]) -> bool:
        if self._num_leftovers:
            self._num_leftovers -= 1
            torch.cuda.empty_cache()
        num_bytes = sum(segments)
        if num_bytes <= self.size_bytes:
            return True
        self._num_leftovers = 2 if self.size_bytes else 0
        self._pool, self.size_bytes = None, 0
        # What profiling and the first steps left cached would be there beside it.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device_index)
        if free < num_bytes + _SPARE_BYTES:
            return False
        try:
            pool = MemoryPool(self.device_index)
            pool.reserve(segments)
        except Exception as error:  # no memory after all, or an allocator without pools
            line = next(iter(str(error).splitlines()), "")
            log.info("planned steps allocate as eager does: %s", line)
            return False
        self._pool, self.size_bytes = pool, num_bytes
        return True

    def held_bytes(self) -> int:
        """With the segments that steps have added."""
        return 0 if self._pool is None else self._pool.large_bytes()

    def enter(self) -> MemoryPool | None:
        if self._pool is None or not self._inside.acquire(blocking=False):
            return None
        try:
            self._pool.__enter__()
        except BaseException:
            self._inside.release()
            raise
        return self._pool

    def leave(self, pool: MemoryPool) -> None:
        try:
            pool.__exit__()
        finally:
            self._inside.release()


class inside:
    """A context in which this thread allocates from the arena; without one, as always."""

    __slots__ = ("_arena", "_pool")

    def __init__(self, arena: Arena | None) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        self._pool = None if self._arena is None else self._arena.enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None and self._arena is not None:
            self._arena.leave(self._pool)


# One per (device index, stream), while a plan uses it.
_arenas: weakref.WeakValueDictionary[tuple[int, int], Arena] = weakref.WeakValueDictionary()


class ArenaUse:
    """What one plan wants of the arena."""

    def __init__(self, device: torch.device, segments: Sequence[int]) -> None:
        self.device, self.segments = device, tuple(segments)
        self.num_outside = self.num_inside = 0
        self._arena: Arena | None = None  # kept: others have it by a weak reference

    @property
    def is_checked_now(self) -> bool:
        """Whether the step that has begun is one of those that can be repeated outside."""
        return 0 < self.num_inside <= NUM_CHECKED_STEPS and bool(self.segments)

    def begin(self, is_watched: bool = False) -> Arena | None:
        """The arena of the step that begins; None: it allocates as always."""
        if not self.segments:
            return None
        if is_watched or self.num_outside < NUM_WARM_STEPS:
            self.num_outside += 1
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        arena = self._here()
        # Of a checked step it is seen how much it needed.
        fits = arena.hold(self.segments) and (
            not self.is_checked_now
            or arena.held_bytes() <= _MOST_GROWTH * max(arena.size_bytes, sum(self.segments))
        )
        if not fits:
            self.give_up()
            return None
        self.num_inside += 1
        return arena

    def give_up(self) -> None:
        """From now on the plan's steps allocate as always."""
        self.segments, self._arena = (), None

    def _here(self) -> Arena:
        index = self.device.index
        if index is None:
            index = torch.cuda.current_device()
        key = (index, torch.cuda.current_stream(index).cuda_stream)
        arena = _arenas.get(key)
        if arena is None:
            arena = _arenas[key] = Arena(index)
        self._arena = arena
        return arena
