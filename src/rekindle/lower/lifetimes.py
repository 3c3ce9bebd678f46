"""Program + steps -> which copy of a value each step reads and makes, and when each copy dies.

The simulator's rule: every run of an op makes new copies of its outputs, a read takes the newest
copy, and a copy dies with its last read unless the caller has it. A transfer is a step as well: a
send and a drop read the newest copy, a fetch makes one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.core.schedule import Step
from rekindle.program.program import Program


@dataclass(frozen=True, slots=True)
class Copy:
    """What one run of an op, or one fetch, makes of a value: from where to where it is there."""

    value: int
    made: int  # step; -1 where it is there from the start
    last_read: int  # step; the one that made it where nobody reads it
    last: int  # step with which it dies; the number of steps where it lives on


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """All copies of a schedule, and which of them each step reads and makes."""

    copies: tuple[Copy, ...]
    reads: tuple[dict[int, int], ...]  # per step: value -> copy
    makes: tuple[dict[int, int], ...]  # per step: value -> copy
    started: dict[int, int]  # value -> copy that is there from the start
    given: dict[int, int]  # value -> copy that the caller gets of the forward
    final: dict[int, int]  # value -> its last copy
    results: dict[int | None, int]  # storage -> last copy, of what the whole step is for
    loss_step: int  # the number of steps where there is no loss

    def dies(self, copy: int, step: int) -> bool:
        return self.copies[copy].last == step


def lifetimes(
    program: Program, steps: Sequence[Step], start: Iterable[int] | None = None
) -> Lifetimes:
    """`start`: the values that are there already, for a backward that runs without its forward; the
    loss then reads nothing, and no op waits for a token."""
    values, end = program.values, len(steps)
    current: dict[int, int] = {}
    made: list[tuple[int, int]] = []  # per copy: value, step
    last: list[int] = []
    for v in dict.fromkeys(start or ()):
        current[v] = len(made)
        made.append((v, -1))
        last.append(-1)
    started = dict(current)
    reads: list[dict[int, int]] = []
    makes: list[dict[int, int]] = []
    given: dict[int, int] = {}
    loss_step = end
    for t, step in enumerate(steps):
        wanted, outputs = _uses(program, step, start is not None)
        reads.append({v: current[v] for v in wanted})
        # Steps come in order, so the last write to an entry is the last read.
        for copy in reads[t].values():
            last[copy] = t
        if isinstance(step, int) and program.ops[step].phase == "loss":
            loss_step = t
            given = {v: current[v] for v in program.given if v in current}
        makes.append({})
        for v in outputs:
            makes[t][v] = current[v] = len(made)
            made.append((v, t))
            last.append(t)
    last_reads = list(last)
    # What the caller holds, and the results, live to the end of the step whoever reads them.
    for v in program.held:
        if v in given:
            last[given[v]] = end
    for v in program.outputs:
        last[current[v]] = end
    return Lifetimes(
        tuple([Copy(*m, r, e) for m, r, e in zip(made, last_reads, last, strict=True)]),
        tuple(reads),
        tuple(makes),
        started,
        given,
        current,
        {values[v].storage: current[v] for v in program.outputs},
        loss_step,
    )


def _uses(program: Program, step: Step, resumed: bool) -> tuple[Sequence[int], Sequence[int]]:
    """The values that a step reads, and those that it makes."""
    if not isinstance(step, int):
        kind, v = step
        return ((v,) if kind in ("send", "drop") else ()), ((v,) if kind == "fetch" else ())
    op, values = program.ops[step], program.values
    wanted = [v for v in op.inputs if not values[v].resident]
    if resumed:
        # Tokens order the forward's effects, and that forward has run.
        wanted = [v for v in wanted if op.phase != "loss" and values[v].storage is not None]
    return wanted, op.outputs
