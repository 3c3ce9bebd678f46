"""Where a training step falls into a row of blocks: the 1-separators of its forward graph.

The forward ops are put in an order in which each stands as late as the op that needs it allows
(`_order`), so that an input that is only read far down the chain does not reach across the blocks
before it. One sweep over that order then finds every place that a single op's values cross
(`_cut`). Left out of the crossing, as HiRemate's C.1.3 does for inputs that need no gradient:
resident values, values of size 0 (they order ops, and cost nothing to keep), what ops that need no
gradient make (masks, position tables), and what only the loss reads beside the forward.

A backward op belongs to the block of its `grad_of`, or of the values it reads, whichever comes
first in the chain (`_place_backward`); where a backward op still reads from inside a later block,
the blocks between are made one (`_merged`). All of it is linear in the size of the problem but for
the merging of too many blocks (`_coarse`), which takes a heap.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from rekindle.core import Problem

PRELUDE = -1  # the block of ops that run once, before the chain


@dataclass(frozen=True, slots=True)
class Rows:
    """The blocks as op ids, in listed order within each."""

    forward: tuple[tuple[int, ...], ...]  # per block
    backward: tuple[tuple[int, ...], ...]  # per block; the loss op is in neither
    prelude: tuple[int, ...]  # ops that need no gradient and serve several blocks
    crossing: tuple[tuple[int, ...], ...]  # per block: the values that the next block reads of it
    pinned: frozenset[int]  # forward values that stay, once made, as long as they are read
    aside: frozenset[int] = field(default=frozenset())  # kept for the loss beside the last block's

    def __len__(self) -> int:
        return len(self.forward)


def refusal(problem: Problem) -> str | None:
    """Why the problem is no training step whose forward can be cut into a chain, or None."""
    phases = {op.phase for op in problem.ops}
    if None in phases:
        name = next(op.name for op in problem.ops if op.phase is None)
        return (
            f"op {name!r} has no phase; a chain of forward and backward blocks needs every op to "
            "be marked forward, loss or backward"
        )
    for phase in ("forward", "backward"):
        if phase not in phases:
            return f"it has no {phase} ops, and a chain is made of forward and backward blocks"
    if any(problem.ops[i].phase != "forward" for i in _forward_reads(problem)):
        return "a forward op reads what the loss or the backward makes"
    return None


def find_rows(problem: Problem, max_blocks: int | None = None) -> Rows | str:
    """The blocks, or the reason why there are none. With more than `max_blocks`, neighbours are
    joined, the smallest first."""
    if (reason := refusal(problem)) is not None:
        return reason
    rows = _Rows(problem).find(max_blocks)
    if len(rows) < 2:
        return (
            "its forward graph is no chain: between its inputs and its loss there is no value "
            "through which everything passes"
        )
    return rows


def _forward_reads(problem: Problem) -> set[int]:
    producer = problem.producer
    return {
        producer[v]
        for op in problem.ops
        if op.phase == "forward"
        for v in op.inputs
        if producer[v] >= 0
    }


class _Rows:
    """The work of `find_rows`: each step fills in `block_of`, which the next one reads."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.producer = problem.producer
        self.forward = [i for i, op in enumerate(problem.ops) if op.phase == "forward"]
        self.backward = [i for i, op in enumerate(problem.ops) if op.phase == "backward"]
        self.loss = problem.loss_op
        # Forward values that cannot be recomputed, or must be there at the end: they stay.
        self.once_made = {v for i in self.forward if problem.ops[i].once for v in self.makes(i)}
        outputs = set(problem.outputs)
        self.stays = self.once_made | {v for i in self.forward for v in self.makes(i)} & outputs
        self.block_of: dict[int, int] = {}
        self.separator: dict[int, int] = {}  # value -> the block whose output it is
        self.side: set[int] = set()  # ops that need no gradient

    def makes(self, op_id: int) -> tuple[int, ...]:
        return self.problem.ops[op_id].outputs

    def find(self, max_blocks: int | None) -> Rows:
        self.side = side = self._side()
        order = self._order(side)
        num_blocks = self._cut(order)
        self._place_leaves(order, side)
        self._place_backward(num_blocks)
        self._place_side(side, num_blocks)
        num_blocks = self._merged(num_blocks)
        if max_blocks is not None and num_blocks > max_blocks:
            num_blocks = self._coarse(num_blocks, max_blocks)
        return self._collect(num_blocks)

    def _side(self) -> set[int]:
        """Forward ops that need no gradient: no backward op belongs to them, nor to what they
        read. Without any `grad_of`, only run-once ops count as such."""
        ops = self.problem.ops
        # An op that the backward belongs to needs a gradient, and all that reads it does.
        paired = {ops[i].grad_of for i in self.backward}
        known = any(i is not None for i in paired)
        side: set[int] = set()
        for i in self.forward:
            if (i in paired) if known else not ops[i].once:
                continue
            if all(self.producer[v] < 0 or self.producer[v] in side for v in ops[i].inputs):
                side.add(i)
        return side

    def _order(self, side: set[int]) -> list[int]:
        """The forward ops that lead to the loss, each right before it is needed; where an op needs
        several, the one with the longest way behind it first."""
        ops, producer = self.problem.ops, self.producer
        # The longest way from an input, in ops: the main path of a network is the longest one, and
        # skips are taken when they are needed.
        depth: dict[int, int] = {}
        needs: dict[int, list[int]] = {}
        read: set[int] = set()
        for i in self.forward:
            before = {producer[v] for v in ops[i].inputs} - {-1} - side
            # What has no size only orders ops (the random ones among themselves): it is no way.
            lead = {producer[v] for v in ops[i].inputs if self.problem.values[v].size} & before
            depth[i] = 1 + max((depth[k] for k in lead), default=0)
            needs[i] = sorted(before, key=lambda k: (depth[k], k))  # the last one is taken first
            read |= before
        if self.loss is not None:
            roots = {producer[v] for v in ops[self.loss].inputs} - {-1} - side
        else:
            roots = set(self.forward) - read - side
        order: list[int] = []
        seen: set[int] = set()
        # Depth first by hand: the way to the loss is as long as the model is deep.
        stack = sorted(roots, key=lambda k: (depth[k], k))
        while stack:
            i = stack[-1]
            if i in seen:
                stack.pop()
                continue
            waiting = [k for k in needs[i] if k not in seen]
            if waiting:
                stack.extend(waiting)
            else:
                seen.add(i)
                order.append(i)
                stack.pop()
        return order

    def _cut(self, order: Sequence[int]) -> int:
        """The sweep: how many ops before the cut have values that are read after it."""
        place = {i: k for k, i in enumerate(order)}
        values, readers = self.problem.values, self.problem.readers
        last: list[int] = []
        for k, i in enumerate(order):
            far = k
            for v in self.makes(i):
                if values[v].size and v not in self.stays:
                    far = max(far, *(place.get(r, k) for r in readers[v]), k)
            last.append(far)
        # How many ops have their last reader at this place.
        ending = [0] * len(order)
        num_open = block = 0
        made = 0  # bytes in the current block: one that makes none is not worth a cut
        for k, i in enumerate(order):
            self.block_of[i] = block
            # `num_open` counts ops, not values: an op with two outputs that both cross is one
            # separator.
            num_open -= ending[k]
            if last[k] > k:
                num_open += 1
                ending[last[k]] += 1
            made += sum(values[v].size for v in self.makes(i))
            if (num_open == 0 and made) or (num_open == 1 and last[k] > k):
                made = 0
                for v in self.makes(i):
                    if any(place.get(r, k) > k for r in readers[v]):
                        self.separator[v] = block
                block += 1
        num_blocks = max(block, 1)
        for i in order:
            self.block_of[i] = min(self.block_of[i], num_blocks - 1)
        return num_blocks

    def _place_leaves(self, order: Sequence[int], side: set[int]) -> None:
        """Forward ops that do not lead to the loss stand with the last op they read from."""
        for i in self.forward:
            if i in self.block_of or i in side:
                continue
            before = (self.producer[v] for v in self.problem.ops[i].inputs)
            self.block_of[i] = max(
                (self.block_of[k] for k in before if k in self.block_of), default=0
            )

    def _place_backward(self, num_blocks: int) -> None:
        ops, block_of = self.problem.ops, self.block_of
        if self.loss is not None:
            block_of[self.loss] = num_blocks - 1
        free: list[int] = []  # ops that nothing ties to a block: they run when they are needed
        for i in self.backward:
            limits = []
            grad_of = ops[i].grad_of
            if grad_of is not None and grad_of in block_of:
                limits.append(block_of[grad_of])
            for v in ops[i].inputs:
                by = self.producer[v]
                if by in block_of and v not in self.stays:
                    limits.append(block_of[by] + (self.separator.get(v) == block_of[by]))
            # The earliest of them in the chain: the backward goes from the last block to the first,
            # so what it reads from later blocks has been made.
            if limits:
                block_of[i] = min(*limits, num_blocks - 1)
            else:
                free.append(i)
        for i in reversed(free):
            after = (block_of[r] for v in self.makes(i) for r in self.problem.readers[v])
            block_of[i] = max(after, default=0)

    def _place_side(self, side: set[int], num_blocks: int) -> None:
        """With the one block that reads it, else in the prelude."""
        for i in sorted(side, reverse=True):
            users = {self.block_of[r] for v in self.makes(i) for r in self.problem.readers[v]}
            self.block_of[i] = users.pop() if len(users) == 1 else PRELUDE

    def _merged(self, num_blocks: int) -> int:
        """Joins the blocks between a backward op and the inside of a later block that it reads, and
        those between a leaf of the forward and the inside of an earlier one."""
        joined = [False] * num_blocks  # whether block k is one with block k + 1
        # How far each block has to be one with those behind it; intervals that overlap are merged
        # in one sweep below.
        reach = list(range(num_blocks))
        if num_blocks > 1 and self._starts_twice():
            reach[0] = 1
        for i in (*self.forward, *self.backward):
            here = self.block_of[i]
            for v in self.problem.ops[i].inputs:
                by = self.producer[v]
                if by < 0 or self.problem.ops[by].phase != "forward" or v in self.stays:
                    continue
                made = self.block_of[by]
                if PRELUDE in (here, made) or self.separator.get(v, here) == here - 1:
                    continue
                low, high = min(here, made), max(here, made)
                if self.problem.values[v].size:
                    reach[low] = max(reach[low], high)
        far = 0
        for k in range(num_blocks):
            far = max(far, reach[k])
            joined[k] = far > k
        return self._join(joined)

    def _starts_twice(self) -> bool:
        """Whether the chain's first op is one of several that begin it side by side (embeddings of
        tokens and of positions): none of them comes before the others."""
        values = self.problem.values
        of_chain = [i for i in self.forward if i not in self.side]
        starts = [
            i
            for i in of_chain
            if all(
                self.producer[v] < 0 or self.producer[v] in self.side or not values[v].size
                for v in self.problem.ops[i].inputs
            )
        ]
        first = [i for i in of_chain if self.block_of[i] == 0]
        return len(first) == 1 and any(self.block_of[i] == 1 for i in starts)

    def _join(self, joined: Sequence[bool]) -> int:
        new = [0]
        for k in range(len(joined) - 1):
            new.append(new[-1] + (not joined[k]))
        for i, block in self.block_of.items():
            if block != PRELUDE:
                self.block_of[i] = new[block]
        self.separator = {v: new[b] for v, b in self.separator.items() if not joined[b]}
        return new[-1] + 1

    def _coarse(self, num_blocks: int, max_blocks: int) -> int:
        """Joins the neighbours that make the fewest bytes together, until few enough are left."""
        weight = [0] * num_blocks
        for i in self.forward:
            if self.block_of[i] != PRELUDE:
                weight[self.block_of[i]] += sum(self.problem.values[v].size for v in self.makes(i))
        left, right = list(range(-1, num_blocks - 1)), list(range(1, num_blocks + 1))
        joined = [False] * num_blocks
        # A heap and links to the neighbours: joining n blocks takes O(n log n). Entries of a pair
        # that has changed are passed over.
        heap = [(weight[k] + weight[k + 1], k, k + 1) for k in range(num_blocks - 1)]
        heapq.heapify(heap)
        gone = [False] * num_blocks
        while num_blocks > max_blocks:
            total, k, after = heapq.heappop(heap)
            if gone[k] or right[k] != after or total != weight[k] + weight[after]:
                continue
            joined[after - 1] = True
            gone[after] = True
            weight[k] = total
            right[k] = right[after]
            if right[after] < len(left):
                left[right[after]] = k
                heapq.heappush(heap, (total + weight[right[k]], k, right[k]))
            if left[k] >= 0:
                heapq.heappush(heap, (weight[left[k]] + total, left[k], k))
            num_blocks -= 1
        return self._join(joined)

    def _collect(self, num_blocks: int) -> Rows:
        problem, block_of = self.problem, self.block_of
        forward: list[list[int]] = [[] for _ in range(num_blocks)]
        backward: list[list[int]] = [[] for _ in range(num_blocks)]
        prelude = [i for i in self.forward if block_of[i] == PRELUDE]
        for i in self.forward:
            if block_of[i] != PRELUDE:
                forward[block_of[i]].append(i)
        for i in self.backward:
            backward[block_of[i]].append(i)
        pinned = {v for i in prelude for v in self.makes(i)} | self.stays
        crossing: list[tuple[int, ...]] = [()] * num_blocks
        for v, block in self.separator.items():
            if v not in pinned:
                crossing[block] += (v,)
        read_by_loss = problem.ops[self.loss].inputs if self.loss is not None else ()
        aside = {
            v
            for v in read_by_loss
            if self.producer[v] >= 0
            and block_of[self.producer[v]] not in (PRELUDE, num_blocks - 1)
            and v not in pinned
            and v not in crossing[num_blocks - 2]
        }
        return Rows(
            forward=tuple(map(tuple, forward)),
            backward=tuple(map(tuple, backward)),
            prelude=tuple(prelude),
            crossing=tuple(crossing),
            pinned=frozenset(pinned),
            aside=frozenset(aside),
        )
