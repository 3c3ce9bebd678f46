"""The CUDA caching allocator as a model: which block each request of a schedule would get.

`memory_allocated` counts blocks, and a block may be larger than its request (see `block_sizes`).
How much larger depends on which blocks happen to be free, so it follows from the whole sequence of
requests. `pool_peak` plays that sequence, step after step, on a pool that holds the residents and
on an empty one: what parameters leave over of their segments is too short for some requests and
a little too long for others (a ResNet-18's gradients take 2 % more beside its parameters than
alone).
"""

import bisect
from collections.abc import Iterator, Sequence

from rekindle.core import Problem, Schedule
from rekindle.core.schedule import Step
from rekindle.profile.block_sizes import LARGE, LARGE_SEGMENT, MIB, ROUND, SEGMENT, SMALL

_SMALL_SEGMENT = 2 * MIB


class Block:
    """A stretch of a segment, in use or free; neighbours in the segment are linked."""

    __slots__ = ("after", "before", "free", "is_small", "order", "size")

    def __init__(self, size: int, order: int, is_small: bool) -> None:
        self.size, self.order, self.is_small = size, order, is_small
        self.free = True
        self.before: Block | None = None
        self.after: Block | None = None


class CachingPool:
    """Best fit over free blocks, split by the allocator's rule, merged when freed."""

    def __init__(self, expandable: bool = False) -> None:
        self._expandable = expandable
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._next = 0
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_bytes = 0

    def allocate(self, request_bytes: int) -> Block:
        # Bytes, rounded up to 512 as the allocator does before it looks for a block.
        size = max(ROUND, -(-request_bytes // ROUND) * ROUND)
        is_small = size <= SMALL
        free = self._free[is_small]
        # The smallest that is large enough; of equal ones the oldest, by `order`, where the
        # allocator takes the lowest address.
        at = bisect.bisect_left(free, (size, -1))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, is_small)
        # What is left over from a large block stays part of it up to 1 MiB: here blocks become
        # larger than requests.
        rest = block.size - size
        if rest >= ROUND if is_small or self._expandable else rest > SMALL:
            self._split(block, size)
        block.free = False
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def release(self, block: Block) -> None:
        self.allocated_bytes -= block.size
        block.free = True
        # Only within a segment: blocks of two segments never become one.
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._forget(neighbour)
                self._merge(block, neighbour)
        self._remember(block)

    def _segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            total = _SMALL_SEGMENT
        elif size < LARGE:
            total = LARGE_SEGMENT
        else:
            total = -(-size // SEGMENT) * SEGMENT
        self.reserved_bytes += total
        return self._new(total, is_small)

    def _new(self, size: int, is_small: bool) -> Block:
        self._next += 1
        return Block(size, self._next, is_small)

    def _split(self, block: Block, size: int) -> None:
        rest = self._new(block.size - size, block.is_small)
        block.size = size
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        self._remember(rest)

    def _merge(self, block: Block, neighbour: Block) -> None:
        block.size += neighbour.size
        if neighbour is block.before:
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block

    def _remember(self, block: Block) -> None:
        bisect.insort(self._free[block.is_small], (block.size, block.order, block))

    def _forget(self, block: Block) -> None:
        free = self._free[block.is_small]
        at = bisect.bisect_left(free, (block.size, block.order))
        assert free[at][2] is block
        free.pop(at)


def pool_peak(
    problem: Problem, schedule: Schedule, *, expandable: bool = False, num_steps: int = 2
) -> int:
    """The most that a step has allocated, by the model of the allocator, above what is resident;
    the worst of some steps in a row, since each finds the pool as the one before has left it."""
    residents = [problem.values[v].size for v in problem.resident]
    steps = list(lifetimes(problem, schedule))
    return max(
        _steps_peak(steps, CachingPool(expandable), num_steps, before) for before in ([], residents)
    )


def _steps_peak(
    steps: Sequence["Lifetimes"], pool: CachingPool, num_steps: int, residents: Sequence[int]
) -> int:
    for size in residents:
        if size:
            pool.allocate(size)
    held = pool.allocated_bytes
    worst = 0
    for _ in range(num_steps):
        pool.peak_bytes = held
        live: dict[int, Block] = {}
        for made, workspace, dead in steps:
            for copy, request, takes_over in made:
                # Written over: the same block, under another copy's name.
                if takes_over is not None:
                    live[copy] = live.pop(takes_over)
                elif request:
                    live[copy] = pool.allocate(request)
            # Temporaries come and go while the op runs, beside its inputs and outputs.
            if workspace:
                pool.release(pool.allocate(workspace))
            for copy in dead:
                if copy in live:
                    pool.release(live.pop(copy))
        worst = max(worst, pool.peak_bytes - held)
        # The caller lets go of gradients and outputs before the next step.
        for block in live.values():
            pool.release(block)
    return worst


Made = tuple[int, int, int | None]  # copy, bytes, the copy whose storage it takes over
Lifetimes = tuple[list[Made], int, Sequence[int]]  # of one step: made, workspace, dying


def lifetimes(problem: Problem, schedule: Schedule) -> Iterator[Lifetimes]:
    """Per step: the copies it makes, its workspace, and the copies that die after it, by the rule
    of `core.simulate`."""
    resident = set(problem.resident)
    steps = schedule.steps
    end = len(steps)
    current: dict[int, int] = {}
    last: list[int] = []
    reads: list[dict[int, int]] = []
    makes: list[list[tuple[int, int]]] = []  # per step: copies and their values
    for step, what in enumerate(steps):
        wanted, outputs, is_loss = _uses(problem, what)
        read = {v: current[v] for v in wanted if v not in resident}
        for copy in read.values():
            last[copy] = max(last[copy], step)
        reads.append(read)
        if is_loss:
            for v in problem.held:
                if v not in resident:
                    last[current[v]] = end
        makes.append([])
        for v in outputs:
            current[v] = len(last)
            last.append(step)
            makes[-1].append((current[v], v))
    for v in problem.outputs:
        if v not in resident:
            last[current[v]] = end
    dying: list[list[int]] = [[] for _ in range(end + 1)]
    for copy, step in enumerate(last):
        dying[step].append(copy)
    for step, what in enumerate(steps):
        op = problem.ops[what] if isinstance(what, int) else None
        pairs = () if op is None else op.inplace
        source = {out: reads[step][v] for v, out in pairs if last[reads[step][v]] == step}
        made = [(copy, problem.values[v].size, source.get(v)) for copy, v in makes[step]]
        yield made, 0 if op is None else op.workspace, dying[step]


def _uses(problem: Problem, step: Step) -> tuple[Sequence[int], Sequence[int], bool]:
    """What a step reads and makes, and whether it is the loss."""
    if isinstance(step, int):
        op = problem.ops[step]
        return op.inputs, op.outputs, op.phase == "loss"
    kind, v = step
    return ((v,) if kind in ("send", "drop") else ()), ((v,) if kind == "fetch" else ()), False
