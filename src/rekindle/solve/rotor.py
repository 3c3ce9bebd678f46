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
rounding and the blocks' measures err on the safe side, the table reaches beyond the budget, the
sequences of all its costs are lowered, and the exact simulation decides (`_ChainSearch.explore`).
`rotor` and `rotor-floating` then drop runs whose older results can stay within the budget
(`_ChainSearch.prune`). `revolve` and `sequential` stay as published.

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
from rekindle.partition.chain import Chain, find_chain, unmeasured_chain
from rekindle.partition.separators import find_rows
from rekindle.solve.base import answer
from rekindle.solve.chain_program import (
    ChainProgram,
    Rule,
    Step,
    lower_steps,
    segment_steps,
    solve_chain,
)

STRETCH = 1.25  # tables reach beyond the budget by this, for what rounding up took away
MAX_TRIALS = 100  # sequences of one table that are lowered and simulated
NUM_PRUNED = 24  # of those, how many lose their needless runs
MAX_TABLE_BYTES = 1 << 30
FEW_SLOTS = 100  # blocks are joined rather than counted in fewer slots than this
FEW_BLOCKS, FEW_BLOCKS_FLOATING = 100, 40  # solved in no time: long chains begin with that many
ADDS_PER_S = 1.5e9  # of the native programs on one slow core; only to choose the slots


class _ChainSearch:
    """From a chain's sequences to schedules that the simulator confirms."""

    def __init__(self, problem: Problem, chain: Chain, budget: int, deadline: float) -> None:
        self.problem = problem
        self.chain = chain
        self.budget = budget
        self.start = time.monotonic()
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

    def try_steps(self, steps: Iterable[Step]) -> float:
        """The cost of the lowered sequence if it fits the budget, else infinity."""
        ops = lower_steps(self.problem, self.chain, steps)
        self.found.append(ops)
        fits = run_native(self.problem, Schedule(tuple(ops))).peak <= self.budget
        return sum(self.problem.ops[i].cost for i in ops) if fits else math.inf

    def try_slots(self, program: ChainProgram, slots: int) -> float:
        """The same for the sequence of that many slots; infinity when time is getting short."""
        sequence = program.sequence(slots)
        if sequence is None or self.left_s() < 0.3 * (self.deadline - self.start):
            return math.inf
        return self.try_steps(sequence.steps)

    def explore(self, program: ChainProgram) -> None:
        """The sequences of all costs in the table, evenly chosen where they are too many. What
        falls away when a sequence is lowered differs from one to the next, and so does how far the
        chain's numbers are above the truth: neither cost nor peak follows the slots strictly."""
        levels = _cost_levels(program)
        stride = -(-len(levels) // MAX_TRIALS)
        self.try_slots(program, program.slots_in(self.budget))  # the chain's numbers allow it
        costs = {k: self.try_slots(program, levels[k]) for k in range(0, len(levels), stride)}
        best = min(costs, key=lambda k: (costs[k], k))
        for k in range(max(0, best - stride), min(len(levels), best + stride + 1)):
            if k not in costs:
                self.try_slots(program, levels[k])

    def fitting(self) -> list[tuple[int, ...]]:
        """What has been found within the budget, the cheapest first, each once."""
        costs = {
            tuple(ops): sum(self.problem.ops[i].cost for i in ops)
            for ops, peak in zip(self.found, self.peaks(), strict=True)
            if peak <= self.budget
        }
        return sorted(costs, key=lambda ops: (costs[ops], ops))

    def peaks(self) -> list[int]:
        return [run_native(self.problem, Schedule(tuple(ops))).peak for ops in self.found]

    def prune(self) -> None:
        """Drops needless runs from what fits: from the cheapest, and from some that leave memory
        free, since single ops are finer than blocks and may use it better."""
        fitting = self.fitting()
        leaner = fitting[:: -(-len(fitting) // NUM_PRUNED)] if fitting else []
        for ops in dict.fromkeys((*fitting[: NUM_PRUNED // 2], *leaner)):
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
    start = time.monotonic()
    deadline = start + time_limit_s
    max_blocks = _affordable_blocks(max_blocks, rule, time_limit_s)
    found: list[Sequence[int]] = [keep_all(problem).ops]
    few = FEW_BLOCKS_FLOATING if rule == Rule.floating else FEW_BLOCKS
    try:
        for blocks, share in ((few, 0.25), (max_blocks, 1.0)):
            chain = find_chain(problem, blocks)
            assert not isinstance(chain, str), "accepts was asked first"
            # A long chain is first solved in coarse blocks, so that there is something to return.
            whole = share == 1.0 or len(chain) < blocks
            solution = solve_on_chain(
                problem,
                chain,
                budget,
                rule,
                name=name,
                slots=slots,
                prune=prune and whole,
                deadline=deadline if whole else start + share * time_limit_s,
                found=found,
            )
            if whole or solution.stopped_by == "interrupt":
                break
            found = [s.ops for s in (solution.schedule, solution.smallest) if s is not None]
    except KeyboardInterrupt:
        return answer(problem, budget, found, solver=name, stopped_by="interrupt")
    return solution


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
    found: Sequence[Sequence[int]] = (),
) -> Solution:
    """The program over a chain that was found and measured, and what becomes of its sequences.
    `found` are schedules that are known already."""
    search = _ChainSearch(problem, chain, budget, deadline)
    search.found += found or [keep_all(problem).ops]
    try:
        slots = _affordable_slots(len(chain), int(slots * STRETCH), rule, search.left_s())
        room = budget - chain.base - chain.blocks[0].input_size
        if room > 0:
            unit = max(1, -(-int(room * STRETCH) // slots))
            program = search.solve(unit, slots, rule)
            if program is not None and program.feasible(slots):
                search.explore(program)
        if not search.fitting() and not search.stopped_by:
            # Below what the chain can do, or only by its safe numbers: look over the whole range.
            program = search.solve(max(1, -(-_most(chain) // slots)), slots, rule)
            if program is not None and program.feasible(slots):
                search.explore(program)
        if prune:
            search.prune()
    except KeyboardInterrupt:
        search.stopped_by = "interrupt"
    return search.answer(name)


def _cost_levels(program: ChainProgram) -> list[int]:
    """The fewest slots of each cost, the cheapest first."""
    levels: list[int] = []
    least = math.inf
    for slots in range(program.slots + 1):
        cost = program.table.cost(slots)
        if cost < least:
            least = cost
            levels.append(slots)
    return levels[::-1]


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
        rows = find_rows(problem)
        assert not isinstance(rows, str), "accepts was asked first"
        chain = unmeasured_chain(problem, rows)
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
