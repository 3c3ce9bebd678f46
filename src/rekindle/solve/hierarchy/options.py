"""Options: ways to run a part's forward and, later, its backward.

An option is two sequences of the part's ops. All else follows from them and is measured by
`measure`, so that whoever makes options (HiRemate, Sec. 3.2.1: any solver) only hands in schedules:
what is saved from the forward to the backward inside the part (the phantom, B.1.1), which values of
others and which own outputs the backward reads (B.1.2: these depend on the option), and the memory
at each sub-step. A sub-step's memory is given as what is inside the part, with the interface values
that are not needed after it and those already made, so that the level above counts them as they
really are (the correction terms of B.3). Sub-steps that are never the worst are left out.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rekindle import _native
from rekindle.core import Problem
from rekindle.partition.parts import Part


@dataclass(frozen=True, slots=True)
class SubStep:
    """What a part has in memory at one step of a run of it."""

    inside: int  # bytes of values of the part that no one else sees, and workspace
    gone: frozenset[int]  # interface values read by this run that are not read after this step
    made: frozenset[int]  # interface values that this run has made by this step


@dataclass(frozen=True, slots=True)
class Option:
    """In the numbers of the part. The sub-steps leave out what the part does not make itself."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_cost: int
    backward_cost: int
    saved: int  # bytes inside the part from the forward to the backward
    kept_outputs: frozenset[int]  # own forward outputs that the backward reads
    backward_reads: frozenset[int]  # values of others (no gradients) that the backward reads
    forward_steps: tuple[SubStep, ...]
    backward_steps: tuple[SubStep, ...]

    @property
    def cost(self) -> int:
        return self.forward_cost + self.backward_cost

    @property
    def forward_peak(self) -> int:
        return max((step.inside for step in self.forward_steps), default=0)

    @property
    def backward_peak(self) -> int:
        return max((step.inside for step in self.backward_steps), default=0)


def split(part: Part, schedule: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """A schedule of the part's problem as its forward and backward runs; None where a backward op
    runs before the loss, or a forward op that runs once after it: no level above could place it."""
    ops = part.problem.ops
    loss = part.problem.loss_op
    assert loss is not None
    # The loss stands once, so it divides the schedule in two.
    at = list(schedule).index(loss)
    # A backward op may be listed behind the loss and run before it if it reads no gradient.
    if any(i > loss for i in schedule[:at]):
        return None
    if any(i < loss and ops[i].once for i in schedule[at:]):
        return None
    return tuple(schedule[:at]), tuple(schedule[at + 1 :])


def measure(part: Part, forward: Sequence[int], backward: Sequence[int]) -> Option:
    """The option that these two sequences are; dead runs are dropped."""
    problem = part.problem
    loss = problem.loss_op
    assert loss is not None
    clean = _native.drop_dead_runs(problem.native, [*forward, loss, *backward])
    at = clean.index(loss)
    forward, backward = tuple(clean[:at]), tuple(clean[at + 1 :])
    first_reads = _first_reads(problem, backward)
    out = frozenset(part.forward_out)
    made_forward = {v for i in forward for v in problem.ops[i].outputs}
    # The phantom (B.1.1): made by the forward, read by the backward, nobody else's business.
    phantom = {v for v in first_reads if v in made_forward and v not in out}
    own_gradients = frozenset(
        v for i in range(loss + 1, len(problem.ops)) for v in problem.ops[i].outputs
    )
    # Gradients for others leave the part: the level above knows how long they live.
    leaving = own_gradients & frozenset(problem.outputs)
    arriving = frozenset(problem.ops[loss].outputs)
    resident = frozenset(problem.resident)
    return Option(
        forward=forward,
        backward=backward,
        forward_cost=sum(problem.ops[i].cost for i in forward),
        backward_cost=sum(problem.ops[i].cost for i in backward),
        saved=sum(problem.values[v].size for v in phantom),
        kept_outputs=frozenset(first_reads) & out,
        backward_reads=frozenset(first_reads) & resident,
        forward_steps=_steps(part, forward, out, resident, frozenset(), phantom),
        backward_steps=_steps(
            part,
            backward,
            leaving,
            (resident | arriving | (frozenset(first_reads) & out)),
            frozenset(phantom),
            set(),
        ),
    )


def bare(part: Part) -> Option:
    """The forward alone, nothing kept but what leaves the part; run-once ops are always in it."""
    problem = part.problem
    loss = problem.loss_op
    assert loss is not None
    # Backwards, since an op is wanted for what stands behind it.
    needed = set(part.forward_out)
    runs: list[int] = []
    for i in reversed(range(loss)):
        if problem.ops[i].once or any(v in needed for v in problem.ops[i].outputs):
            runs.append(i)
            needed.update(problem.ops[i].inputs)
    forward = tuple(reversed(runs))
    out = frozenset(part.forward_out)
    steps = _steps(part, forward, out, frozenset(problem.resident), frozenset(), set())
    cost = sum(problem.ops[i].cost for i in forward)
    return Option(forward, (), cost, 0, 0, frozenset(), frozenset(), steps, ())


def _first_reads(problem: Problem, ops: Sequence[int]) -> list[int]:
    """The values that these runs read before they make them."""
    made: set[int] = set()
    reads: dict[int, None] = {}
    for i in ops:
        for v in problem.ops[i].inputs:
            if v not in made:
                reads[v] = None
        made.update(problem.ops[i].outputs)
    return list(reads)


def _steps(
    part: Part,
    ops: Sequence[int],
    leaving: frozenset[int],
    arriving: frozenset[int],
    start: frozenset[int],
    keep: set[int],
) -> tuple[SubStep, ...]:
    """Memory at each run: `leaving` and `arriving` are interface values, `start` is inside from
    the beginning, `keep` stays inside to the end."""
    problem = part.problem
    sizes = [value.size for value in problem.values]
    borrowed: dict[int, list[int]] = {}
    for i, v, _ in part.borrowed:
        borrowed.setdefault(i, []).append(v)
    # One pass back over the runs finds the last use of every copy: a value that is made twice has
    # two copies with a use each.
    last_read: dict[int, int] = {}  # of the copy that is current while going backwards
    ends: list[dict[int, int]] = [{} for _ in ops]  # per step: the last read of what it makes
    final = dict.fromkeys(keep, len(ops))
    for t in reversed(range(len(ops))):
        op = problem.ops[ops[t]]
        for v in op.outputs:
            ends[t][v] = final.pop(v, last_read.pop(v, t))
        for v in op.inputs:
            last_read[v] = max(last_read.get(v, -1), t)
    reading = {v: last_read[v] for v in arriving if v in last_read}
    until = {v: last_read.get(v, -1) for v in start}
    inside = sum(sizes[v] for v in start)
    live = set(start)
    gone: frozenset[int] = frozenset()
    made: frozenset[int] = frozenset()
    ending: dict[int, list[int]] = {}
    for v, last in reading.items():
        ending.setdefault(last, []).append(v)
    # Sub-steps with the same interface values gone and made differ in bytes alone: the worst of
    # them is enough.
    steps: dict[tuple[frozenset[int], frozenset[int]], int] = {}
    for t, i in enumerate(ops):
        op = problem.ops[i]
        for v in op.outputs:
            if v in leaving:
                made = made if v in made else made | {v}
                continue
            if v not in live:
                live.add(v)
                inside += sizes[v]
            until[v] = ends[t][v]
        saved = sum(
            sizes[b] for a, b in op.inplace if a in live and until[a] == t and b not in leaving
        )
        # An input whose storage the run takes over counts as it is after the run.
        taken = [v for v in borrowed.get(i, ()) if reading.get(v) == t]
        now = gone.union(taken) if taken else gone
        bytes_inside = inside + op.workspace - saved
        if bytes_inside > steps.get((now, made), -1):
            steps[now, made] = bytes_inside
        if t in ending:
            gone = gone.union(ending[t])
        for v in [v for v in (*op.inputs, *op.outputs) if v in live and until[v] <= t]:
            live.discard(v)
            inside -= sizes[v]
    return _worst(SubStep(inside, gone, made) for (gone, made), inside in steps.items())


def _worst(steps: Iterable[SubStep]) -> tuple[SubStep, ...]:
    """Without those that another one is always at least as large as."""
    kept: list[SubStep] = []
    # By falling bytes, so that what could cover a sub-step has been seen before it.
    for step in sorted(steps, key=lambda s: (-s.inside, len(s.gone) - len(s.made))):
        if not any(
            k.inside >= step.inside and k.gone <= step.gone and k.made >= step.made for k in kept
        ):
            kept.append(step)
    return tuple(kept)


def select(options: Iterable[Option], count: int) -> list[Option]:
    """At most `count` of the options that no other one beats in everything: the cheapest, the one
    with the smallest peak, those on the lower hull of cost over bytes saved (what a level above
    would mix), then those that fill the largest gaps in what they save (HiRemate 3.2.2)."""
    front = pareto(options)
    if len(front) <= count:
        return front
    # By what is saved: neighbours in this order are what a gap lies between.
    front.sort(key=lambda o: (o.saved, o.cost))
    peak = min(front, key=lambda o: (max(o.forward_peak, o.backward_peak), o.cost))
    cheapest = min(front, key=lambda o: (o.cost, o.saved))
    chosen = [front.index(cheapest)]
    chosen += [k for k in (front.index(peak), *_hull(front)) if k not in chosen]
    # The cheapest first, so that it stays whatever the count.
    chosen = list(dict.fromkeys(chosen))[:count]
    while len(chosen) < count:
        chosen.append(_fill_gap(front, sorted(chosen)))
    return [front[k] for k in sorted(chosen)]


def _hull(front: list[Option]) -> list[int]:
    """The lower convex hull of cost over saved, the sharpest corners first."""
    hull: list[int] = []
    for k, option in enumerate(front):
        if hull and option.cost >= front[hull[-1]].cost:
            continue
        while len(hull) > 1 and _turn(front[hull[-2]], front[hull[-1]], option) <= 0:
            hull.pop()
        hull.append(k)
    inner = range(1, len(hull) - 1)
    corners = sorted(
        inner,
        key=lambda j: -_turn(front[hull[j - 1]], front[hull[j]], front[hull[j + 1]]),
    )
    ends = [hull[0], *([hull[-1]] if len(hull) > 1 else [])]
    return [*ends, *(hull[j] for j in corners)]


def _turn(a: Option, b: Option, c: Option) -> int:
    """Positive where b lies below the line from a to c."""
    return (b.saved - a.saved) * (c.cost - a.cost) - (b.cost - a.cost) * (c.saved - a.saved)


def _fill_gap(front: list[Option], taken: list[int]) -> int:
    best, place = -1, -1
    for low, high in itertools.pairwise(taken):
        for k in range(low + 1, high):
            gap = min(front[k].saved - front[low].saved, front[high].saved - front[k].saved)
            if gap > best:
                best, place = gap, k
    if best >= 0:
        return place
    return next(k for k in range(len(front)) if k not in taken)


def pareto(options: Iterable[Option]) -> list[Option]:
    """Those that no other one beats in cost, bytes saved, reads and peaks together."""
    kept: list[Option] = []
    # Cheapest first: what beats another stands before it, but for ties.
    for option in sorted(options, key=lambda o: (o.cost, o.saved, o.backward_peak)):
        if not any(_beats(other, option) for other in kept):
            kept.append(option)
    return kept


def _beats(a: Option, b: Option) -> bool:
    return (
        a.cost <= b.cost
        and a.forward_cost <= b.forward_cost
        and a.saved <= b.saved
        and a.forward_peak <= b.forward_peak
        and a.backward_peak <= b.backward_peak
        and a.kept_outputs <= b.kept_outputs
        and a.backward_reads <= b.backward_reads
    )


OptionMaker = Callable[[Part, float], list[Option]]  # a part and the seconds it may take
