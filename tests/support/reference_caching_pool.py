"""The CUDA caching allocator's rules, written down plainly: what the native model is held against.

One list of segments, each a list of blocks in address order; every request looks at all of them.
Rules are those of c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.15.
"""

from dataclasses import dataclass, field

MIB = 2**20
ROUND, SMALL, LARGE, STEP, SMALL_SEGMENT = 512, MIB, 10 * MIB, 2 * MIB, 2 * MIB


@dataclass
class Stretch:
    size: int
    state: str = "free"  # "free", "used" or "unmapped"


@dataclass
class Segment:
    is_small: bool
    blocks: list[Stretch] = field(default_factory=list)


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class ReferencePool:
    def __init__(
        self,
        expandable: bool = False,
        large_segment: int = 20 * MIB,
        divisions: int = 0,
        max_split: int | None = None,
    ) -> None:
        self.expandable, self.large_segment = expandable, large_segment
        self.divisions, self.max_split = divisions, max_split
        self.segments: list[Segment] = []
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0

    def rounded(self, request: int) -> int:
        if self.divisions > 1 and request > ROUND * self.divisions:
            power = 1 << (request.bit_length() - 1)
            if power != request:
                return power + up(request - power, max(power // self.divisions, 1))
            return request
        return max(ROUND, up(request, ROUND))

    def reserve(self, size: int) -> None:
        """A free large segment that is there before anything is asked for."""
        self.segments.append(Segment(False, [Stretch(size)]))
        self._count(reserved=size)

    def allocate(self, request: int) -> tuple[Segment, Stretch]:
        size = self.rounded(request)
        is_small = size <= SMALL
        found = self._best_fit(size, is_small) or self._fresh(size, is_small)
        segment, at = found
        block = segment.blocks[at]
        rest = block.size - size
        if is_small or self.expandable:
            splits = rest >= ROUND
        else:
            splits = rest > SMALL and (self.max_split is None or size < self.max_split)
        if splits:
            segment.blocks[at : at + 1] = [Stretch(size), Stretch(rest)]
        block = segment.blocks[at]
        block.state = "used"
        self._count(allocated=block.size)
        return segment, block

    def release(self, handle: tuple[Segment, Stretch]) -> None:
        segment, block = handle
        self._count(allocated=-block.size)
        block.state = "free"
        self._merge(segment)

    def _merge(self, segment: Segment) -> None:
        merged: list[Stretch] = []
        for block in segment.blocks:
            if merged and block.state == merged[-1].state != "used":
                merged[-1].size += block.size
            else:
                merged.append(block)
        segment.blocks = merged

    def _count(self, allocated: int = 0, reserved: int = 0) -> None:
        self.allocated += allocated
        self.reserved += reserved
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _best_fit(self, size: int, is_small: bool) -> tuple[Segment, int] | None:
        found = []
        for number, segment in enumerate(self.segments):
            if segment.is_small != is_small:
                continue
            for at, block in enumerate(segment.blocks):
                if block.state == "free" and block.size >= size:
                    found.append((block.size, number, at))
        if not found:
            return None
        found.sort()
        which = 0
        if self.expandable:
            # A block before unmapped addresses counts with these; of split blocks the next larger
            # is taken while it can become less large.
            def room(entry: tuple[int, int, int]) -> int:
                block_size, number, at = entry
                blocks = self.segments[number].blocks
                after = blocks[at + 1] if at + 1 < len(blocks) else None
                return block_size + (after.size if after and after.state == "unmapped" else 0)

            while (
                which + 1 < len(found)
                and len(self.segments[found[which][1]].blocks) > 1
                and room(found[which + 1]) < room(found[which])
            ):
                which += 1
        size_found, number, at = found[which]
        if self.max_split is not None:
            if size < self.max_split <= size_found:
                return None
            if size >= self.max_split and size_found >= size + 20 * MIB:
                return None
        return self.segments[number], at

    def _fresh(self, size: int, is_small: bool) -> tuple[Segment, int]:
        if self.expandable:
            return self._expanded(size, is_small)
        if is_small:
            total = SMALL_SEGMENT
        elif size < LARGE:
            total = self.large_segment
        else:
            total = up(size, STEP)
        self.segments.append(Segment(is_small, [Stretch(total)]))
        self._count(reserved=total)
        return self.segments[-1], 0

    def _expanded(self, size: int, is_small: bool) -> tuple[Segment, int]:
        unit = SMALL_SEGMENT if is_small else self.large_segment
        for segment in self.segments:
            if segment.is_small == is_small:
                break
        else:
            segment = Segment(is_small, [Stretch(2**50 // unit * unit, "unmapped")])
            self.segments.append(segment)
        blocks = segment.blocks
        # Addresses are unmapped at the end alone: nothing here gives pages back.
        if len(blocks) > 1 and blocks[-2].state == "free":
            more = up(size - blocks[-2].size, unit)
            blocks[-2].size += more
        else:
            more = up(size, unit)
            blocks.insert(len(blocks) - 1, Stretch(more))
        blocks[-1].size -= more
        self._count(reserved=more)
        return segment, len(blocks) - 2
