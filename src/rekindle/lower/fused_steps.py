"""Which steps of a schedule run as one kernel with the step that follows.

A residual sum and the layer norm that reads it, where the one comes right after the other. Nothing
of the plan changes but one thing: what the sum reads last lives on until the norm is made. That is
allowed where no step's memory passes the peak that the simulation has for the schedule.
"""

from collections.abc import Sequence

import torch

from rekindle.capture.node_facts import facts
from rekindle.core import Problem, Schedule, simulate
from rekindle.core.schedule import Step
from rekindle.lower.lifetimes import Lifetimes
from rekindle.program.program import Program

aten = torch.ops.aten

# Of the peak: the allocator's blocks were counted for the order without joins.
ROOM = 0.98


def joined_steps(
    program: Program, schedule: Schedule, lives: Lifetimes, problem: Problem | None
) -> frozenset[int]:
    """The first steps of such pairs. Without a problem: of those that need no memory."""
    steps = schedule.steps
    pairs = [t for t in range(len(steps) - 1) if _is_pair(program, steps, lives, t)]
    if not pairs:
        return frozenset()
    # Simulated once for all pairs: a pair that is joined holds more memory at its own step alone.
    trace = None if problem is None else simulate(problem, schedule)
    found = []
    for t in pairs:
        later = _kept_longer(program, steps[t], lives, t)
        if not later:
            found.append(t)
        elif trace is not None and problem is not None:
            more = sum(problem.values[v].size for v in later)
            # Units are bytes, of blocks: the sizes of the problem.
            if trace.memory[t + 1] + more <= ROOM * trace.peak:
                found.append(t)
    return frozenset(found)


def _is_pair(program: Program, steps: Sequence[Step], lives: Lifetimes, t: int) -> bool:
    one, other = steps[t], steps[t + 1]
    if not isinstance(one, int) or not isinstance(other, int):
        return False
    first, second = program.ops[one], program.ops[other]
    if len(first.nodes) != 1 or len(second.nodes) != 1:
        return False
    total, norm = first.nodes[0], second.nodes[0]
    if not facts(norm).with_sum or norm.args[0] is not total:
        return False
    # A sum that was joined with something else already is no add any more.
    if total.target is not aten.add.Tensor or first.writes or second.writes:
        return False
    made = first.makes[facts(total).storage]
    return second.instead is None and lives.reads[t + 1].get(made) == lives.makes[t][made]


def _kept_longer(program: Program, step: Step, lives: Lifetimes, t: int) -> list[int]:
    """Values that would be gone before the norm is made: all that the sum reads last, but for the
    one that it is written over."""
    assert isinstance(step, int)
    first = program.ops[step]
    dying = [v for v, copy in lives.reads[t].items() if lives.dies(copy, t)]
    if first.instead is not None and first.instead.source in dying:
        dying.remove(first.instead.source)
    return dying
