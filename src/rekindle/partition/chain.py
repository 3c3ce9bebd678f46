"""A chain of blocks with the sizes and costs that the chain programs ask for.

Block i reads one activation (the input) and makes the next. Its forward runs *bare*, with nothing
kept but its output, or by one of its *options*, which saves what the option's backward reads. In
Rotor's words, an activation is a, what an option saves is a-bar, a gradient is delta, and a peak
without what stands is an overhead.

Every peak is that of `core.simulate` on the block alone (`Measure`): the block's input and all
that stands beside it count as always there, so a sequence that fits by these numbers fits by the
simulator. `standing` holds, beside the incoming gradient, everything else that the backward has
made by then and that stays: parameter gradients, parts of shared ones, held outputs.

The last block has the loss in its middle. It has two options: save, loss, backward; or bare, loss,
once more, backward.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle.core import Op, Problem, Schedule, Value, simulate
from rekindle.partition.separators import Rows, find_rows


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run a block's forward and backward. Its peaks leave out the block's input and what
    stands beside it."""

    saved: int  # from the forward to the backward, the block's output included
    forward_peak: int
    backward_peak: int  # what was saved included
    cost: int
    forward_ops: tuple[int, ...] = ()
    backward_ops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a chain, with the sizes and costs that the dynamic program needs."""

    input_size: int
    standing: int  # gradients there when this block's backward is the next one
    bare_cost: int
    bare_peak: int  # where the input stays, the input left out
    pass_peak: int  # where the input may go, the input counted
    options: tuple[Option, ...]
    forward_ops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """A problem as a sequence of blocks, of which each reads from the one before alone."""

    blocks: tuple[Block, ...]
    base: int = 0  # bytes that are there all the time
    prelude: tuple[int, ...] = ()  # ops that run once before the chain

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a chain in Rotor's quantities (Table 1)."""

    forward_cost: int  # u_f
    backward_cost: int  # u_b
    output: int  # a
    saved: int  # a-bar, the output included; where it is less than the output, the output counts
    gradient: int  # delta, of the output
    forward_overhead: int = 0  # o_f
    backward_overhead: int = 0  # o_b
    kept_gradient: int = 0  # what the backward makes that stays to the end: parameter gradients


def chain_of_stages(stages: Sequence[Stage], input_size: int, input_gradient: int) -> Chain:
    """The chain of such stages; the last one is the loss."""
    blocks: list[Block] = []
    size, gradient = input_size, input_gradient
    kept = sum(stage.kept_gradient for stage in stages)
    for stage in stages:
        kept -= stage.kept_gradient
        # a-bar holds the output a by definition; a chain measured in reality may say less.
        saved = max(stage.saved, stage.output)
        option = Option(
            saved=saved,
            forward_peak=saved + stage.forward_overhead,
            backward_peak=gradient + saved + stage.backward_overhead + stage.kept_gradient,
            cost=stage.forward_cost + stage.backward_cost,
        )
        blocks.append(
            Block(
                input_size=size,
                standing=stage.gradient + kept,
                bare_cost=stage.forward_cost,
                bare_peak=stage.output + stage.forward_overhead,
                pass_peak=size + stage.output + stage.forward_overhead,
                options=(option,),
            )
        )
        size, gradient = stage.output, stage.gradient
    return Chain(tuple(blocks))


def find_chain(problem: Problem, max_blocks: int | None = None) -> Chain | str:
    """The chain of a training step, or the reason why it is none."""
    rows = find_rows(problem, max_blocks)
    return rows if isinstance(rows, str) else Measure(problem, rows).chain()


def unmeasured_chain(problem: Problem, rows: Rows) -> Chain:
    """The blocks as op ids alone, for methods that ask for no sizes."""
    loss = () if problem.loss_op is None else (problem.loss_op,)
    blocks = []
    for k, (forward, backward) in enumerate(zip(rows.forward, rows.backward, strict=True)):
        behind = (*loss, *backward) if k == len(rows) - 1 else backward
        blocks.append(Block(0, 0, 0, 0, 0, (Option(0, 0, 0, 0, forward, behind),), forward))
    return Chain(tuple(blocks), 0, rows.prelude)


class Measure:
    """Sizes and costs of each block, by simulating it alone."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem = problem
        self.rows = rows
        self.last = len(rows) - 1
        self.outputs = set(problem.outputs)
        self.block_of: dict[int, int] = {}  # of backward ops, the loss included
        for k, ops in enumerate(rows.backward):
            self.block_of.update(dict.fromkeys(ops, k))
        loss = problem.loss_op
        self.loss = () if loss is None else (loss,)
        self.block_of.update(dict.fromkeys(self.loss, self.last))
        self.sizes = [value.size for value in problem.values]

    def chain(self, more: Mapping[int, Sequence[Option]] | None = None) -> Chain:
        """The chain; `more` gives blocks further options, made by `option` or `last_option`."""
        standing = self._standing()
        blocks = [self._block(k, standing[k]) for k in range(len(self.rows))]
        for k, options in (more or {}).items():
            blocks[k] = replace(blocks[k], options=(*blocks[k].options, *options))
        # Counted from the beginning to the end, also before it is made: safe, and simple.
        base = self.total(self.rows.pinned | self.rows.aside)
        return Chain(tuple(blocks), base, self.rows.prelude)

    def total(self, values: Iterable[int]) -> int:
        return sum(self.sizes[v] for v in values)

    def cost(self, ops: Iterable[int]) -> int:
        """Run-once ops are left out: they are paid for once, whatever the sequence."""
        return sum(self.problem.ops[i].cost for i in ops if not self.problem.ops[i].once)

    def _until(self, v: int) -> int:
        """The last block of the backward (the smallest number) that needs v; -1: to the end."""
        if v in self.outputs:
            return -1
        return min((self.block_of[r] for r in self.problem.readers[v]), default=self.last + 1)

    def _standing(self) -> list[int]:
        """Per block k: what blocks after k made in the backward for block k and later, and what
        the caller holds since the loss."""
        # A difference array over the blocks, from the last to the first.
        change = [0] * (len(self.rows) + 1)
        for i, made in self.block_of.items():
            for v in self.problem.ops[i].outputs:
                until = max(self._until(v), 0)
                if until < made:
                    change[made - 1] += self.sizes[v]
                    change[until - 1] -= self.sizes[v] if until else 0
        # Of these the base has one copy already, and no run makes a second.
        single = {v for i in self.rows.prelude for v in self.problem.ops[i].outputs}
        single |= {v for op in self.problem.ops if op.once for v in op.outputs}
        held = set(self.problem.held) - set(self.problem.resident)
        change[self.last - 1] += self.total(held - single - self.rows.aside)
        # Behind the last block nothing of the backward exists yet.
        standing = [0] * len(self.rows)
        total = 0
        for k in range(self.last - 1, -1, -1):
            total += change[k]
            standing[k] = total
        return standing

    def _block(self, k: int, standing: int) -> Block:
        forward = self.rows.forward[k]
        inputs = self.rows.crossing[k - 1] if k else ()
        outputs = self.rows.crossing[k]
        options = (
            self._last_options()
            if k == self.last
            else (self.option(k, forward, self.rows.backward[k]),)
        )
        return Block(
            input_size=self.total(inputs),
            standing=standing,
            bare_cost=self.cost(forward),
            bare_peak=self._peak(forward, keep=outputs),
            pass_peak=self._peak(forward, start=inputs, keep=outputs),
            options=options,
            forward_ops=forward,
        )

    def option(self, k: int, forward: Sequence[int], backward: Sequence[int]) -> Option:
        """The block's forward and backward by these runs; the backward may repeat forward ops."""
        made_again: set[int] = set()
        read: set[int] = set()
        for i in backward:
            read.update(v for v in self.problem.ops[i].inputs if v not in made_again)
            made_again.update(self.problem.ops[i].outputs)
        made = dict.fromkeys(v for i in forward for v in self.problem.ops[i].outputs)
        saved = [v for v in made if v in read and v not in self.rows.pinned]
        crossing = self.rows.crossing[k]
        arriving = [
            v for v in read if self._is_gradient(v) and self._made(v) > k and self._until(v) == k
        ]
        leaving = self._leaving(backward, k)
        peak = self._peak(backward, start=(*saved, *arriving), keep=leaving)
        return Option(
            saved=self.total({*saved, *crossing}),
            forward_peak=self._peak(forward, keep={*saved, *crossing}),
            backward_peak=max(0, peak - self.total(arriving)),
            cost=self.cost(forward) + self.cost(backward),
            forward_ops=tuple(forward),
            backward_ops=tuple(backward),
        )

    def _leaving(self, ops: Iterable[int], k: int) -> set[int]:
        """What these runs make in the backward for blocks before k, or for the end."""
        own = {i for i in ops if i in self.block_of}
        return {v for i in own for v in self.problem.ops[i].outputs if self._until(v) < k}

    def last_option(self, first: Sequence[int], second: Sequence[int]) -> Option:
        """The last block by these runs, the loss op among them."""
        runs = (*first, *second)
        peak = self._peak(runs, keep=self._leaving(runs, self.last))
        cost = self.cost(first) + self.cost(second)
        return Option(0, peak, peak, cost, tuple(first), tuple(second))

    def _last_options(self) -> tuple[Option, ...]:
        forward, backward = self.rows.forward[-1], self.rows.backward[-1]
        again = tuple(i for i in forward if not self.problem.ops[i].once)
        save = self.last_option(forward, (*self.loss, *backward))
        if not (self.loss and again):
            return (save,)
        return save, self.last_option((*forward, *self.loss), (*again, *backward))

    def _is_gradient(self, v: int) -> bool:
        return self.problem.producer[v] in self.block_of

    def _made(self, v: int) -> int:
        return self.block_of[self.problem.producer[v]]

    def _peak(
        self, ops: Sequence[int], *, start: Iterable[int] = (), keep: Iterable[int] = ()
    ) -> int:
        """The simulated peak of these ops alone: `start` is there at first and goes after its last
        use, `keep` stays to the end, pinned values and all else that is read is not counted."""
        pinned = self.rows.pinned
        values: dict[int, int] = {}
        sizes: list[Value] = []

        def local(v: int) -> int:
            if v not in values:
                values[v] = len(sizes)
                sizes.append(Value("", 0 if v in pinned else self.sizes[v]))
            return values[v]

        source = tuple(local(v) for v in start if v not in pinned)
        produced = {*start, *(v for i in ops for v in self.problem.ops[i].outputs)}
        parts = [Op("start", 0, (), source)] if source else []
        first = len(parts)
        place: dict[int, int] = {}
        steps = list(range(first))
        for i in ops:
            if i not in place:
                place[i] = len(parts)
                op = self.problem.ops[i]
                parts.append(
                    replace(
                        op,
                        inputs=tuple(local(v) for v in op.inputs),
                        outputs=tuple(local(v) for v in op.outputs),
                        inplace=tuple(
                            (local(v), local(out))
                            for v, out in op.inplace
                            if v in produced and not {v, out} & pinned
                        ),
                    )
                )
            steps.append(place[i])
        made = {v for op in parts for v in op.outputs}
        part = Problem(
            values=tuple(sizes),
            ops=tuple(parts),
            resident=tuple(v for v in range(len(sizes)) if v not in made),
            outputs=tuple({values[v] for v in keep if v in values and values[v] in made}),
            held=tuple(values[v] for v in self.problem.held if v in values)
            if any(op.phase == "loss" for op in parts)
            else (),
        )
        return simulate(part, Schedule(tuple(steps))).peak
