"""From a chain of blocks to schedules that the simulator confirms, for all methods on chains.

`solve_by_rule` finds the chain of a problem, a long one first in coarse blocks, and solves it by
one of the programs of `chain_dp`; `solve_on_chain` does that for a chain that is known. Memory
is counted in slots, sizes rounded up. As rounding and the blocks' measures err on the safe side,
the table reaches beyond the budget, the sequences of all its costs are lowered, and the exact
simulation decides (`ChainSearch.explore`). Then runs may go whose older results can stay within the
budget (`ChainSearch.prune`).
"""

import math
import time
from collections.abc import Iterable, Sequence

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, keep_all
from rekindle.core.simulate import run_native
from rekindle.partition.chain import Chain, find_chain
from rekindle.solve.base import best_solution
from rekindle.solve.chains.chain_dp import (
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


class ChainSearch:
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
        # A tenth is left for what is made of the table.
        program = solve_chain(self.chain, unit, slots, rule, 0.9 * self.left_s())
        if program is None:
            out_of_time = time.monotonic() - start >= 0.85 * (self.deadline - start)
            self.stopped_by = "time limit" if out_of_time else "interrupt"
            # Without a table there are still equal segments, near the square root of the length,
            # where their peak is smallest if all blocks are alike.
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
        # The rest of the time is for pruning.
        if sequence is None or self.left_s() < 0.3 * (self.deadline - self.start):
            return math.inf
        return self.try_steps(sequence.steps)

    def explore(self, program: ChainProgram) -> None:
        """The sequences of all costs in the table, evenly chosen where they are too many. What
        falls away when a sequence is lowered differs from one to the next, and so does how far the
        chain's numbers are above the truth: neither cost nor peak follows the slots strictly."""
        # Sequences of equal cost differ in memory alone, so one of each cost is enough.
        levels = _cost_levels(program)
        stride = -(-len(levels) // MAX_TRIALS)
        self.try_slots(program, program.slots_in(self.budget))  # the chain's numbers allow it
        costs = {k: self.try_slots(program, levels[k]) for k in range(0, len(levels), stride)}
        best = min(costs, key=lambda k: (costs[k], k))
        # Around the best of the coarse look, every one.
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

    def solution(self, name: str) -> Solution:
        # Every op that is not dead runs at least once, so their cost is a bound.
        bound = sum(op.cost for op in self.problem.ops)
        notes = (f"{len(self.chain)} blocks",)
        return best_solution(
            self.problem,
            self.budget,
            self.found,
            solver=name,
            bound=bound,
            stopped_by=self.stopped_by,
            notes=notes,
        )


def _adds_per_slot(num_blocks: int, rule: Rule) -> float:
    return num_blocks**4 / 12 if rule == Rule.floating else num_blocks**3 / 6


def _affordable_blocks(max_blocks: int, rule: Rule, time_limit_s: float) -> int:
    """Fewer blocks where a coarse table would not fit the time."""
    # A quarter of the time, since the speed is a guess for a slow core.
    adds = 0.25 * time_limit_s * ADDS_PER_S / FEW_SLOTS
    while max_blocks > 8 and _adds_per_slot(max_blocks, rule) > adds:
        max_blocks = max_blocks * 9 // 10
    return max_blocks


def _affordable_slots(num_blocks: int, slots: int, rule: Rule, time_limit_s: float) -> int:
    """Fewer slots where the table would not fit the time or the memory."""
    by_time = 0.25 * time_limit_s * ADDS_PER_S / _adds_per_slot(num_blocks, rule)
    # The bytes of a table with 0 slots are those of one column of it.
    by_memory = MAX_TABLE_BYTES / _native.chain_table_bytes(num_blocks, 0, rule)
    return max(20, int(min(slots, by_time, by_memory)))


def solve_by_rule(
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
    """The best chain schedule that a rule finds, over chains of fewer and more blocks."""
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
        return best_solution(problem, budget, found, solver=name, stopped_by="interrupt")
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
    search = ChainSearch(problem, chain, budget, deadline)
    search.found += found or [keep_all(problem).ops]
    try:
        slots = _affordable_slots(len(chain), int(slots * STRETCH), rule, search.left_s())
        room = budget - chain.base - chain.blocks[0].input_size
        if room > 0:
            unit = max(1, -(-int(room * STRETCH) // slots))
            program = search.solve(unit, slots, rule)
            if program is not None and program.feasible(slots):
                search.explore(program)
        # One table answers for all budgets up to its last slot; the second one reaches to where
        # everything is saved, and its sequences say how small the chain can get.
        if not search.fitting() and not search.stopped_by:
            # Below what the chain can do, or only by its safe numbers: look over the whole range.
            program = search.solve(max(1, -(-_most(chain) // slots)), slots, rule)
            if program is not None and program.feasible(slots):
                search.explore(program)
        if prune:
            search.prune()
    except KeyboardInterrupt:
        search.stopped_by = "interrupt"
    return search.solution(name)


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
