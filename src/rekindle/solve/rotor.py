"""`rotor`, `rotor-floating`, `revolve` and `sequential`: methods for a chain of blocks.

Beaumont et al., "Optimal re-materialization strategies for heterogeneous chains", ACM TOMS 2024.
The chain is that of `partition.chain`; its forward runs bare (F_none, and F_ck where the input is
kept) or by an option that saves what its backward reads (F_all); B is that backward.

- rotor (Sec. 4.4, Alg. 3-4): an input that is kept stays until its backward. With C(s, t, m) the
  least cost of blocks s to t with m bytes beside the input of s,
    C(s, t, m) = min( cost(s) + C(s+1, t, m - saved(s)),                            F_all first
                      min_k bare(s..k-1) + C(k, t, m - input(k)) + C(s, k-1, m) )   F_ck first
  where each run must fit beside what stands. O(n^3 M), `cpp/chain_dp.cpp`.
- rotor-floating (Sec. 4.3, Alg. 1-2): the last kept input may be given up for a later one. The
  theorem as printed misses the move of that input alone; with it, and in O(n^4 M) where the paper
  has O(n^6 M), in `cpp/chain_floating.cpp`.
- revolve (Sec. 5.4): only inputs are kept, and F_all runs right before its backward.
- sequential (Chen et al. 2016; torch's checkpoint_sequential): equal segments, of each only the
  input is kept; every number of segments is tried.

Memory is counted in slots (500 to the budget), sizes rounded up. The sequence becomes op ids
(`lower_steps`): F_none, F_ck and F_all are the same ops, what is kept follows from later reads. As
rounding and the blocks' measures err on the safe side, larger tables than the budget's are tried
too, and the exact simulation decides (`_ChainSearch.widest`). `rotor` and `rotor-floating` then
drop runs whose older results can stay within the budget (`_ChainSearch.pruned`), also from
sequences for less memory (`_ChainSearch.leaner`): single ops are finer than blocks. `revolve` and
`sequential` stay as published.

Known limits: within a block all or nothing is saved; values that ops without a gradient share
between blocks, and results of run-once ops, are kept from their first run on; more than
`max_blocks` blocks are joined to that many.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, Status, keep_all
from rekindle.core.simulate import run_native
from rekindle.partition.chain import Chain, find_chain
from rekindle.partition.separators import find_rows
from rekindle.solve.base import answer

Rule = _native.ChainRule
Run = _native.ChainRun
Step = tuple[Run, int, int]  # run, block, option

STRETCH = 1.25  # tables reach beyond the budget by this, for what rounding up took away
NUM_LEANER = 12  # sequences for less memory that are tried as well
MAX_TABLE_BYTES = 1 << 30
FEW_SLOTS = 100  # blocks are joined rather than counted in fewer slots than this
ADDS_PER_S = 1.5e9  # of the native programs on one slow core; only to choose the slots


@dataclass(frozen=True, slots=True)
class Sequence1:
    """A sequence of Table 1's operations and its cost by the chain's numbers."""

    steps: tuple[Step, ...]
    cost: int


@dataclass(frozen=True, slots=True)
class ChainProgram:
    """A solved chain: the best sequence for every number of slots."""

    chain: Chain
    unit: int
    slots: int
    table: _native.ChainTable

    def feasible(self, slots: int) -> bool:
        return slots >= 0 and self.table.cost(slots) < math.inf

    def sequence(self, slots: int) -> Sequence1 | None:
        if not self.feasible(slots):
            return None
        return Sequence1(tuple(self.table.build(slots)), int(self.table.cost(slots)))

    def slots_in(self, budget: int) -> int:
        """The slots that a budget leaves beside the base and the chain's own input."""
        room = budget - self.chain.base - self.chain.blocks[0].input_size
        return min(self.slots, room // self.unit)


def solve_chain(
    chain: Chain, unit: int, slots: int, rule: Rule, time_limit_s: float = 1e9
) -> ChainProgram | None:
    """The program for up to `slots` slots of `unit` bytes; None where time ran out."""
    blocks = chain.blocks
    table = _native.solve_chain(
        inputs=[b.input_size for b in blocks],
        standing=[b.standing for b in blocks],
        bare_costs=[b.bare_cost for b in blocks],
        bare_peaks=[b.bare_peak for b in blocks],
        pass_peaks=[b.pass_peak for b in blocks],
        options=[
            [(o.saved, o.forward_peak, o.backward_peak, o.cost) for o in b.options] for b in blocks
        ],
        unit=unit,
        slots=slots,
        rule=rule,
        time_limit_s=time_limit_s,
    )
    return ChainProgram(chain, unit, slots, table) if table.finished else None


def best_sequence(
    chain: Chain, budget: int, rule: Rule = Rule.persistent, *, slots: int = 500
) -> Sequence1 | None:
    """The best sequence of Table 1's operations within the budget; None where there is none."""
    room = budget - chain.base - chain.blocks[0].input_size
    if room < 0:
        return None
    program = solve_chain(chain, max(1, -(-room // slots)), slots, rule)
    assert program is not None
    return program.sequence(program.slots_in(budget))


def lower_steps(problem: Problem, chain: Chain, steps: Iterable[Step]) -> list[int]:
    """The op ids of a sequence; run-once ops stand where they are first met."""
    ops = list(chain.prelude)
    for run, k, option in steps:
        block = chain.blocks[k]
        if run == Run.save:
            ops += block.options[option].forward_ops
        elif run == Run.back:
            ops += block.options[option].backward_ops
        else:
            ops += block.forward_ops
    done: set[int] = set()
    kept: list[int] = []
    for i in ops:
        if problem.ops[i].once:
            if i in done:
                continue
            done.add(i)
        kept.append(i)
    return _native.drop_dead_runs(problem.native, kept)


def segment_steps(num_blocks: int, num_segments: int) -> list[Step]:
    """Equal segments, the last one with the rest; of all but the last only the input is kept."""
    size = num_blocks // num_segments
    starts = [k * size for k in range(num_segments)]
    steps: list[Step] = []
    for first in starts[:-1]:
        steps.append((Run.keep, first, -1))
        steps += [(Run.drop, k, -1) for k in range(first + 1, first + size)]
    for first, end in zip(starts[::-1], [num_blocks, *starts[:0:-1]], strict=True):
        steps += [(Run.save, k, 0) for k in range(first, end)]
        steps += [(Run.back, k, 0) for k in reversed(range(first, end))]
    return steps


class _ChainSearch:
    """From a chain's sequences to schedules that the simulator confirms."""

    def __init__(self, problem: Problem, chain: Chain, budget: int, deadline: float) -> None:
        self.problem = problem
        self.chain = chain
        self.budget = budget
        self.deadline = deadline
        self.found: list[Sequence[int]] = []
        self.stopped_by = ""

    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def solve(self, unit: int, slots: int, rule: Rule) -> ChainProgram | None:
        start = time.monotonic()
        program = solve_chain(self.chain, unit, slots, rule, 0.9 * self.left_s())
        if program is None:
            out_of_time = time.monotonic() - start >= 0.85 * (self.deadline - start)
            self.stopped_by = "time limit" if out_of_time else "interrupt"
            root = math.isqrt(len(self.chain))
            for count in {2, max(1, root // 2), root, min(2 * root, len(self.chain))}:
                self.try_steps(segment_steps(len(self.chain), count))
        return program

    def try_steps(self, steps: Iterable[Step]) -> bool:
        """Lowers a sequence; whether it fits the budget by the simulator."""
        ops = lower_steps(self.problem, self.chain, steps)
        self.found.append(ops)
        return bool(run_native(self.problem, Schedule(tuple(ops))).peak <= self.budget)

    def try_slots(self, program: ChainProgram, slots: int) -> bool:
        sequence = program.sequence(slots)
        return sequence is not None and self.try_steps(sequence.steps)

    def widest(self, program: ChainProgram, low: int) -> int:
        """The most slots whose schedule still fits, by bisection; `low` is known to be feasible.
        More slots never cost more, and mostly mean a higher peak."""
        high = program.slots
        if not self.try_slots(program, low):
            high = low
            low = next(m for m in range(low + 1) if program.feasible(m))
            self.try_slots(program, low)
        while low < high and self.left_s() > 0:
            middle = (low + high + 1) // 2
            if self.try_slots(program, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def leaner(self, program: ChainProgram, high: int) -> None:
        """Sequences for less memory than there is: what they leave free, single runs may use."""
        low = _least(program)
        for k in range(NUM_LEANER):
            self.try_slots(program, low + (high - low) * k // NUM_LEANER)

    def fits(self) -> bool:
        return any(
            run_native(self.problem, Schedule(tuple(ops))).peak <= self.budget for ops in self.found
        )

    def pruned(self) -> None:
        """Drops needless runs from what fits, the cheapest first, while there is time."""
        fitting = {
            tuple(ops): sum(self.problem.ops[i].cost for i in ops)
            for ops in self.found
            if run_native(self.problem, Schedule(tuple(ops))).peak <= self.budget
        }
        for ops in sorted(fitting, key=lambda ops: (fitting[ops], ops)):
            left = self.left_s()
            if left > 0:
                self.found.append(
                    _native.drop_needless_runs(
                        self.problem.native, list(ops), self.budget, 0.5 * left
                    )
                )

    def answer(self, name: str) -> Solution:
        # Every op that is not dead runs at least once, so their cost is a bound.
        bound = sum(op.cost for op in self.problem.ops)
        notes = (f"{len(self.chain)} blocks",)
        solution = answer(
            self.problem,
            self.budget,
            self.found,
            solver=name,
            bound=bound,
            stopped_by=self.stopped_by,
            notes=notes,
        )
        if self.stopped_by and not solution.status.has_schedule:
            return replace(solution, status=Status.TIME_LIMIT)
        return solution


def _adds_per_slot(num_blocks: int, rule: Rule) -> float:
    return num_blocks**4 / 12 if rule == Rule.floating else num_blocks**3 / 6


def _affordable_blocks(max_blocks: int, rule: Rule, time_limit_s: float) -> int:
    """Fewer blocks where a coarse table would not fit the time."""
    adds = 0.25 * time_limit_s * ADDS_PER_S / FEW_SLOTS
    while max_blocks > 8 and _adds_per_slot(max_blocks, rule) > adds:
        max_blocks = max_blocks * 9 // 10
    return max_blocks


def _affordable_slots(num_blocks: int, slots: int, rule: Rule, time_limit_s: float) -> int:
    """Fewer slots where the table would not fit the time or the memory."""
    by_time = 0.25 * time_limit_s * ADDS_PER_S / _adds_per_slot(num_blocks, rule)
    by_memory = MAX_TABLE_BYTES / _native.chain_table_bytes(num_blocks, 0, rule)
    return max(20, int(min(slots, by_time, by_memory)))


def _solve_by_rule(
    problem: Problem,
    budget: int,
    rule: Rule,
    *,
    name: str,
    slots: int,
    max_blocks: int,
    prune: bool,
    time_limit_s: float,
) -> Solution:
    deadline = time.monotonic() + time_limit_s
    chain = find_chain(problem, _affordable_blocks(max_blocks, rule, time_limit_s))
    assert not isinstance(chain, str), "accepts was asked first"
    return solve_on_chain(
        problem, chain, budget, rule, name=name, slots=slots, prune=prune, deadline=deadline
    )


def solve_on_chain(
    problem: Problem,
    chain: Chain,
    budget: int,
    rule: Rule,
    *,
    name: str,
    slots: int,
    prune: bool,
    deadline: float,
) -> Solution:
    """The program over a chain that was found and measured, and what becomes of its sequences."""
    search = _ChainSearch(problem, chain, budget, deadline)
    search.found.append(keep_all(problem).ops)
    try:
        slots = _affordable_slots(len(chain), int(slots * STRETCH), rule, search.left_s())
        room = budget - chain.base - chain.blocks[0].input_size
        if room > 0:
            unit = max(1, -(-int(room * STRETCH) // slots))
            program = search.solve(unit, slots, rule)
            if program is not None and program.feasible(slots):
                fitting = search.widest(program, max(program.slots_in(budget), _least(program)))
                if prune:
                    search.leaner(program, fitting)
        if not search.fits() and not search.stopped_by:
            # Below what the chain can do, or only by its safe numbers: look over the whole range.
            program = search.solve(max(1, -(-_most(chain) // slots)), slots, rule)
            if program is not None and program.feasible(slots):
                search.widest(program, _least(program))
        if prune:
            search.pruned()
    except KeyboardInterrupt:
        search.stopped_by = "interrupt"
    return search.answer(name)


def _least(program: ChainProgram) -> int:
    """The fewest slots with a sequence; the largest number has one."""
    low, high = 0, program.slots
    while low < high:
        middle = (low + high) // 2
        if program.feasible(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _most(chain: Chain) -> int:
    """Bytes with which everything can be saved."""
    peaks = [
        b.standing + max(o.forward_peak, o.backward_peak) for b in chain.blocks for o in b.options
    ]
    return sum(max(o.saved for o in b.options) for b in chain.blocks) + max(peaks)


def _reason(problem: Problem) -> str | None:
    rows = find_rows(problem)
    return rows if isinstance(rows, str) else None


@dataclass(frozen=True, slots=True)
class Rotor:
    slots: int = 500
    max_blocks: int = 400
    prune: bool = True  # False: the paper's sequence as it is

    name: ClassVar[str] = "rotor"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return _reason(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        return _solve_by_rule(
            problem,
            budget,
            Rule.persistent,
            name=self.name,
            slots=self.slots,
            max_blocks=self.max_blocks,
            prune=self.prune,
            time_limit_s=time_limit_s,
        )


@dataclass(frozen=True, slots=True)
class RotorFloating:
    slots: int = 500
    max_blocks: int = 80
    prune: bool = True  # False: the paper's sequence as it is

    name: ClassVar[str] = "rotor-floating"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return _reason(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        return _solve_by_rule(
            problem,
            budget,
            Rule.floating,
            name=self.name,
            slots=self.slots,
            max_blocks=self.max_blocks,
            prune=self.prune,
            time_limit_s=time_limit_s,
        )


@dataclass(frozen=True, slots=True)
class Revolve:
    slots: int = 500
    max_blocks: int = 400

    name: ClassVar[str] = "revolve"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return _reason(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        return _solve_by_rule(
            problem,
            budget,
            Rule.revolve,
            name=self.name,
            slots=self.slots,
            max_blocks=self.max_blocks,
            prune=False,
            time_limit_s=time_limit_s,
        )


@dataclass(frozen=True, slots=True)
class Sequential:
    max_trials: int = 64

    name: ClassVar[str] = "sequential"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return _reason(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        deadline = time.monotonic() + time_limit_s
        chain = find_chain(problem)
        assert not isinstance(chain, str), "accepts was asked first"
        search = _ChainSearch(problem, chain, budget, deadline)
        search.found.append(keep_all(problem).ops)
        try:
            for count in _counts(len(chain), self.max_trials):
                if search.left_s() == 0:
                    search.stopped_by = "time limit"
                    break
                search.try_steps(segment_steps(len(chain), count))
        except KeyboardInterrupt:
            search.stopped_by = "interrupt"
        return search.answer(self.name)


def _counts(num_blocks: int, max_trials: int) -> list[int]:
    """Every number of segments, or, of a long chain, those in even ratios."""
    if num_blocks <= max_trials:
        return list(range(1, num_blocks + 1))
    ratio = num_blocks ** (1 / (max_trials - 1))
    return sorted({round(ratio**k) for k in range(max_trials)})
