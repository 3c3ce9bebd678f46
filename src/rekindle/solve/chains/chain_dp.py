"""The chain programs of the native core, for a `Chain`: the best sequence for every memory size.

A sequence is made of Rotor's Table 1 operations: F_none (`Run.drop`: the input goes), F_ck
(`Run.keep`: it stays), F_all by an option (`Run.save`), and B of that option (`Run.back`). What the
programs compute is in `rotor`; what the numbers of a chain mean is in `partition.chain`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle import _native
from rekindle.core import Problem
from rekindle.partition.chain import Chain

Rule = _native.ChainRule
Run = _native.ChainRun
# The option is -1 for a forward that runs bare.
Step = tuple[Run, int, int]  # run, block, option


@dataclass(frozen=True, slots=True)
class ChainSequence:
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
        # A budget below the base gives a negative number of slots.
        return slots >= 0 and self.table.cost(slots) < math.inf

    def sequence(self, slots: int) -> ChainSequence | None:
        if not self.feasible(slots):
            return None
        return ChainSequence(tuple(self.table.build(slots)), int(self.table.cost(slots)))

    def slots_in(self, budget: int) -> int:
        """The slots that a budget leaves beside the base and the chain's own input."""
        # The input of the first block is there from the beginning to the end of every part, so the
        # program does not count it.
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
    # A table that is not finished answers nothing: the row of the whole chain needs all others and
    # is filled last.
    return ChainProgram(chain, unit, slots, table) if table.finished else None


def best_sequence(
    chain: Chain, budget: int, rule: Rule = Rule.persistent, *, slots: int = 500
) -> ChainSequence | None:
    """The best sequence of Table 1's operations within the budget; None where there is none."""
    room = budget - chain.base - chain.blocks[0].input_size
    if room < 0:
        return None
    # The unit is rounded up, so that so many slots reach over all of the room.
    program = solve_chain(chain, max(1, -(-room // slots)), slots, rule)
    assert program is not None
    return program.sequence(program.slots_in(budget))


def lower_steps(problem: Problem, chain: Chain, steps: Iterable[Step]) -> list[int]:
    """The op ids of a sequence; run-once ops stand where they are first met."""
    # F_none, F_ck and F_all are the same ops. What is kept follows from who reads it later, and the
    # simulator keeps every value to its last use.
    ops = list(chain.prelude)
    for run, k, option in steps:
        block = chain.blocks[k]
        if run == Run.save:
            ops += block.options[option].forward_ops
        elif run == Run.back:
            ops += block.options[option].backward_ops
        else:
            ops += block.forward_ops
    # Values of run-once ops stay from their first run on: the chain counts them in its base.
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
    # As `torch.utils.checkpoint.checkpoint_sequential` cuts.
    size = num_blocks // num_segments
    starts = [k * size for k in range(num_segments)]
    steps: list[Step] = []
    for first in starts[:-1]:
        steps.append((Run.keep, first, -1))
        steps += [(Run.drop, k, -1) for k in range(first + 1, first + size)]
    # Backwards: the last segment has kept everything; of each one before, the input is there, and
    # it runs once more, saving all, right before its backward.
    for first, end in zip(starts[::-1], [num_blocks, *starts[:0:-1]], strict=True):
        steps += [(Run.save, k, 0) for k in range(first, end)]
        steps += [(Run.back, k, 0) for k in reversed(range(first, end))]
    return steps
