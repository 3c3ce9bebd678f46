"""Static placement: offsets in one range of addresses for blocks whose lifetimes are known.

Blocks that live at once must not overlap, and the range should be short: dynamic storage
allocation, strongly NP-hard. The most bytes that live at once are a lower bound; `place` looks for
a placement near it with a greedy order that is improved step by step, and with an exact search over
canonical placements (`cpp/place`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rekindle import _native


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are needed from one time up to another, which is exclusive."""

    size: int
    birth: int
    death: int
    alignment: int = 1  # of its offset


@dataclass(frozen=True, slots=True)
class Placement:
    """An offset per block, and how long the range is."""

    offsets: tuple[int, ...]
    size_bytes: int  # the end of the highest block
    lower_bound: int  # proven: no placement is shorter

    @property
    def gap(self) -> float:
        """How much longer than the lower bound, at most, a shortest placement could make it; 0:
        it is the shortest."""
        return self.size_bytes / self.lower_bound - 1 if self.lower_bound else 0.0


def place(
    blocks: Iterable[Block], *, capacity: int = 0, time_limit_s: float = 10.0, seed: int = 0
) -> Placement:
    """The shortest placement found. The search ends where it is proven to be the shortest, where it
    is within the capacity, if one is given, or when its time is up."""
    rows = [(b.size, b.birth, b.death, b.alignment) for b in blocks]
    offsets, size_bytes, bound = _native.place(rows, capacity, seed, time_limit_s)
    return Placement(tuple(offsets), size_bytes, bound)


def overlapping(blocks: Iterable[Block], offsets: Iterable[int]) -> tuple[int, int] | None:
    """Two blocks that live at once and share an address, or a misaligned one twice; None where the
    placement is valid."""
    placed = sorted(
        (block.birth, number, block, offset)
        for number, (block, offset) in enumerate(zip(blocks, offsets, strict=True))
        if block.size and block.birth < block.death
    )
    alive: list[tuple[int, Block, int]] = []
    for _, number, block, offset in placed:
        if offset < 0 or offset % block.alignment:
            return number, number
        alive = [each for each in alive if each[1].death > block.birth]
        for other, beside, theirs in alive:
            if offset < theirs + beside.size and theirs < offset + block.size:
                return other, number
        alive.append((number, block, offset))
    return None
