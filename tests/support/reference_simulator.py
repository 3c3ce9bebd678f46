"""The meaning of memory and cost once more, as plainly as possible and slow: per step, which copies
are alive. Nothing is shared with the native simulator.

A copy is the pair (value, step that made it). `last_use` looks ahead for each copy on its own.
"""

from dataclasses import dataclass

from rekindle.core import Problem, Schedule


class Invalid(Exception):
    pass


@dataclass(frozen=True)
class ReferenceTrace:
    memory: tuple[int, ...]
    peak: int
    peak_step: int
    cost: int
    runs: tuple[int, ...]


def simulate(problem: Problem, schedule: Schedule) -> ReferenceTrace:
    steps = schedule.ops
    check(problem, steps)
    sizes = [value.size for value in problem.values]
    copies = [(v, t) for t, i in enumerate(steps) for v in problem.ops[i].outputs]
    alive_until = {copy: last_use(problem, steps, copy) for copy in copies}
    memory = []
    for t, i in enumerate(steps):
        op = problem.ops[i]
        used = sum(sizes[v] for (v, born), end in alive_until.items() if born <= t <= end)
        for source, target in op.inplace:
            newest = max(born for v, born in copies if v == source and born < t)
            if alive_until[source, newest] == t:
                used -= sizes[target]
        memory.append(used + op.workspace)
    peak = max(memory, default=0)
    return ReferenceTrace(
        memory=tuple(memory),
        peak=peak,
        peak_step=memory.index(peak) if memory else -1,
        cost=sum(problem.ops[i].cost for i in steps),
        runs=tuple(steps.count(i) for i in range(len(problem.ops))),
    )


def last_use(problem: Problem, steps: tuple[int, ...], copy: tuple[int, int]) -> int:
    """The last step at which the copy is in memory; len(steps) for one that lives on."""
    value, born = copy
    last = born
    for t in range(born + 1, len(steps)):
        op = problem.ops[steps[t]]
        if value in op.inputs:
            last = t
            if op.phase == "loss" and value in problem.held:
                return len(steps)
        if value in op.outputs:
            return max(last, pinned_until(problem, steps, copy))
    last = max(last, pinned_until(problem, steps, copy))
    return len(steps) if value in problem.outputs else last


def pinned_until(problem: Problem, steps: tuple[int, ...], copy: tuple[int, int]) -> int:
    """The last step of a backward op whose forward op has read this very copy, or -1."""
    value, born = copy
    until = -1
    for v, backward in problem.pinned:
        if v != value:
            continue
        read = steps.index(problem.ops[backward].grad_of)
        newest = max((t for t in range(read) if v in problem.ops[steps[t]].outputs), default=-1)
        if newest == born:
            until = max(until, steps.index(backward))
    return until


def check(problem: Problem, steps: tuple[int, ...]) -> None:
    there = set(problem.resident)
    for t, i in enumerate(steps):
        if i not in range(len(problem.ops)):
            raise Invalid(f"step {t} names no op")
        if not there.issuperset(problem.ops[i].inputs):
            raise Invalid(f"step {t} reads what is not there")
        there.update(problem.ops[i].outputs)
    for i, op in enumerate(problem.ops):
        if op.once and steps.count(i) != 1:
            raise Invalid(f"op {i} stands {steps.count(i)} times")
    if not there.issuperset(problem.outputs):
        raise Invalid("an output is missing")
