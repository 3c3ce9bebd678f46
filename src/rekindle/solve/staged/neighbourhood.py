"""A part of a schedule as a problem of its own: which runs again of a few ops are worth their cost,
all else being as it is.

Large-neighbourhood search for an exact method: the runs again of the *free* ops are taken out of
the schedule; what is left, the skeleton, stays as it is. The values that free ops make and read are
decided anew; all other values live exactly as before. That is a `Problem`:

- a step of the skeleton that makes or reads a free value is an op that runs once; the steps between
  two of them are one op;
- the first run of a free op is an op that may run again;
- other values that live across a boundary between ops: one value for each pair of first and last
  op, with the sum of their sizes; what they take within an op is its workspace.

A schedule of it (`Neighbourhood.schedule`) is one of the whole problem with the same peak, and
costs as much more or less as its own runs again.

Known limits: a free op may only read what is made once, or by another free op; others are left as
they are. What lives to the end is not overwritten.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rekindle.core import Op, Problem, Schedule, Value, simulate

Copy = tuple[int, int, int]  # (value, step that makes it, last step)
_MAX_GROUP = 4096  # steps of the skeleton that are one op at most


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What is left to decide, and how its schedules become schedules of the whole."""

    problem: Problem
    start: Schedule  # the given schedule, as one of `problem`
    steps: tuple[tuple[int, ...], ...]  # per op: the ops of the whole that it stands for

    def schedule(self, found: Schedule) -> Schedule:
        """A schedule of `problem` as one of the whole problem."""
        return Schedule(tuple(i for g in found.ops for i in self.steps[g]))


def neighbourhood(
    problem: Problem, schedule: Schedule, free: Iterable[int], budget: int
) -> Neighbourhood | None:
    """The neighbourhood in which the runs again of the free ops change; None if none of them may,
    or if the given schedule does not fit into it."""
    builder = _Builder(problem, schedule.ops, free)
    if not builder.free:
        return None
    made = builder.build()
    if simulate(made.problem, made.start).peak > budget:
        return None
    return made


def without_multiple_sources(
    problem: Problem, schedule: Sequence[int], free: Iterable[int]
) -> set[int]:
    """The free ops whose inputs are made once, or by free ops."""
    counts = [0] * len(problem.ops)
    for i in schedule:
        counts[i] += 1
    held, ops, producer = set(problem.held), problem.ops, problem.producer
    found = {i for i in free if not ops[i].once and held.isdisjoint(ops[i].outputs)}
    while True:
        bad = {
            i
            for i in found
            for v in ops[i].inputs
            if producer[v] >= 0 and counts[producer[v]] > 1 and producer[v] not in found
        }
        if not bad:
            return found
        found -= bad


@dataclass(slots=True)
class _Builder:
    problem: Problem
    steps: Sequence[int]
    given: Iterable[int]
    free: set[int] = field(init=False)
    tracked: set[int] = field(init=False)  # the values that are decided anew
    skeleton: list[int] = field(init=False, default_factory=list)  # ops
    again: list[tuple[int, int]] = field(init=False, default_factory=list)  # before step, free op

    def __post_init__(self) -> None:
        problem = self.problem
        self.free = without_multiple_sources(problem, self.steps, self.given)
        made = {v for i in self.free for v in problem.ops[i].outputs}
        read = {v for i in self.free for v in problem.ops[i].inputs if problem.producer[v] >= 0}
        self.tracked = made | read
        seen: set[int] = set()
        for i in self.steps:
            if i in self.free and i in seen:
                self.again.append((len(self.skeleton), i))
            else:
                self.skeleton.append(i)
            seen.add(i)

    def build(self) -> Neighbourhood:
        copies = self._other_copies()
        groups = self._groups(copies)
        group_of = [g for g, (first, last) in enumerate(groups) for _ in range(first, last)]
        return self._problem(copies, groups, group_of)

    def _touches(self, i: int) -> bool:
        op = self.problem.ops[i]
        return not self.tracked.isdisjoint(op.inputs) or not self.tracked.isdisjoint(op.outputs)

    def _other_copies(self) -> list[Copy]:
        """(value, first, last step) of each copy of a value that stays as it is; the step after
        the last one for what lives to the end."""
        problem, end = self.problem, len(self.skeleton)
        resident = set(problem.resident)
        current: dict[int, list[int]] = {}
        copies = []
        for k, i in enumerate(self.skeleton):
            op = problem.ops[i]
            for v in op.inputs:
                if v in current and current[v][2] < end:
                    current[v][2] = end if op.phase == "loss" and v in problem.held else k
            for v in op.outputs:
                if v not in self.tracked and v not in resident and problem.values[v].size:
                    current[v] = [v, k, k]
                    copies.append(current[v])
        for v in problem.outputs:
            if v in current:
                current[v][2] = end
        return [(v, first, last) for v, first, last in copies]

    def _memory(self, copies: Sequence[Copy]) -> list[int]:
        """Per step: what the other values take, with the workspace and without what is written in
        place over one of them."""
        problem = self.problem
        change = [0] * (len(self.skeleton) + 2)
        dies: set[tuple[int, int]] = set()
        for v, first, last in copies:
            change[first] += problem.values[v].size
            change[last + 1] -= problem.values[v].size
            dies.add((v, last))
        memory, total = [], 0
        for k, i in enumerate(self.skeleton):
            total += change[k]
            op = problem.ops[i]
            saved = sum(problem.values[out].size for v, out in op.inplace if (v, k) in dies)
            memory.append(total + op.workspace - saved)
        return memory

    def _groups(self, copies: Sequence[Copy]) -> list[tuple[int, int]]:
        """Steps [first, last) that are one op: one that touches a free value by itself, others
        together, while what lives across their ends is not more than what is there at once."""
        problem, memory = self.problem, self._memory(copies)
        boundary = {k for k, _ in self.again}
        begins: dict[int, list[Copy]] = {}
        for copy in copies:
            begins.setdefault(copy[1], []).append(copy)
        groups: list[tuple[int, int]] = []
        alive: list[Copy] = []  # made before the group, or in it
        first = 0
        while first < len(self.skeleton):
            last = first + 1
            alive = [copy for copy in alive if copy[2] >= first]
            into = sum(problem.values[v].size for v, _, _ in alive)
            alive += begins.get(first, [])
            most = memory[first]
            if not self._touches(self.skeleton[first]):
                inside = list(begins.get(first, []))
                while last < len(self.skeleton) and last - first < _MAX_GROUP:
                    if last in boundary or self._touches(self.skeleton[last]):
                        break
                    inside += begins.get(last, [])
                    out = sum(problem.values[v].size for v, _, until in inside if until > last)
                    if into + out > max(most, memory[last]):
                        break
                    most = max(most, memory[last])
                    alive += begins.get(last, [])
                    last += 1
            groups.append((first, last))
            first = last
        return groups

    def _problem(
        self, copies: Sequence[Copy], groups: Sequence[tuple[int, int]], group_of: Sequence[int]
    ) -> Neighbourhood:
        problem, end = self.problem, len(groups)
        values = sorted(self.tracked)
        new_value = {v: k for k, v in enumerate(values)}
        sizes = [problem.values[v].size for v in values]
        wanted = [new_value[v] for v in values if v in problem.outputs or v in problem.held]
        inputs: list[list[int]] = [[] for _ in groups]
        outputs: list[list[int]] = [[] for _ in groups]
        taken = [0] * (end + 1)  # by the other values that live across, per group
        into: list[dict[int, int]] = [{} for _ in groups]  # value: what stands for its copy
        made: list[dict[int, int]] = [{} for _ in groups]
        across: dict[tuple[int, int], int] = {}  # (first, last group): what stands for it
        in_place = {v for op in problem.ops for pair in op.inplace for v in pair}
        for v, first, last in copies:
            g, h = group_of[first], group_of[last] if last < len(self.skeleton) else end
            if g == h:
                continue
            # What may be overwritten, or written over something, stands for itself.
            new = across.get((g, h)) if v not in in_place else None
            if new is None:
                new = len(sizes)
                sizes.append(0)
                outputs[g].append(new)
                (inputs[h] if h < end else wanted).append(new)
                if v in in_place:
                    made[g][v] = new
                    if h < end:
                        into[h][v] = new
                else:
                    across[g, h] = new
            sizes[new] += problem.values[v].size
            for k in range(g, min(h, end - 1) + 1):
                taken[k] += problem.values[v].size
        memory = self._memory(copies)
        ops, steps = [], []
        for g, (first, last) in enumerate(groups):
            here = tuple(self.skeleton[first:last])
            whole = problem.ops[here[0]]
            pairs, most = [], max(memory[first:last])
            for v, out in whole.inplace if last == first + 1 else ():
                source, target = into[g].get(v), made[g].get(out)
                if source is not None and (target is not None or out in new_value):
                    most += problem.values[out].size  # taken off by the pair, not by the workspace
                source = new_value.get(v, source)
                target = new_value.get(out, target)
                if source is not None and target is not None:
                    pairs.append((source, target))
            if not (
                makes := [*(new_value[v] for v in whole.outputs if v in new_value), *outputs[g]]
            ):
                makes.append(len(sizes))  # an op makes something
                sizes.append(0)
            steps.append(here)
            ops.append(
                Op(
                    name=whole.name,
                    cost=sum(problem.ops[i].cost for i in here),
                    inputs=(*(new_value[v] for v in whole.inputs if v in new_value), *inputs[g]),
                    outputs=tuple(makes),
                    workspace=max(0, most - taken[g]),
                    recomputable=here[0] in self.free,
                    inplace=tuple(pairs),
                )
            )
        made_problem = Problem(
            values=tuple(Value(f"v{k}", size) for k, size in enumerate(sizes)),
            ops=tuple(ops),
            outputs=tuple(wanted),
        )
        return Neighbourhood(made_problem, self._start(groups, steps), tuple(steps))

    def _start(
        self, groups: Sequence[tuple[int, int]], steps: Sequence[tuple[int, ...]]
    ) -> Schedule:
        first_run = {here[0]: g for g, here in enumerate(steps) if here[0] in self.free}
        at: dict[int, list[int]] = {}
        for k, i in self.again:
            at.setdefault(k, []).append(first_run[i])
        start = []
        for g, (first, _) in enumerate(groups):
            start += [*at.get(first, []), g]
        return Schedule((*start, *at.get(len(self.skeleton), [])))
