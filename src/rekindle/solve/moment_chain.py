"""A lower bound from several moments at once, by mixed-integer programming: for any order.

`lower_bound` looks at one moment, the first run of one op, and relaxes the budget to a price; that
loses where few large values fill the memory, and where what is recomputed for one moment is in the
way at the next. Here moments are the first runs of ops i_1, ..., i_m, each an ancestor of the next,
so that their order is known whatever the schedule; they cut it into intervals 0, ..., m. For every
schedule within the budget, with 0/1 values, of op j, value v (made by p), interval q and moment k,
which opens interval k:

    r[j,q]  j runs in q              x[j,k]  j runs before k           y[j,k]  j runs at k or after
    s[v,k]  a copy of v lives at k

    sum of r[j,q] >= 1; = 1 for an op that runs once                               `_add_op`
    r[j,q] <= r[p,q] + s[v,q]           what j reads is made in q or lives as q begins
    x[j,k] <= x[p,k], x[j,k] <= sum of r[j,q<k], x[j,k] <= x[j,k+1] <= x[j,k] + r[j,k]
    x[j,k] + y[j,k] >= 1, r[j,k] <= y[j,k], y[j,k+1] <= y[j,k] <= sum of r[j,q>=k]
    s[v,k] >= y[j,k] - y[p,k]           read at k or after: it lives at k, or is made after
    s[v,k] + y[p,k] >= 1                for what must be there at the end
    s[v,k] <= s[v,k-1] + r[p,k-1]                                                  `_add_value`
    sum of size[v] s[v,k] <= budget - what i_k makes and its workspace, less what it may write in
        place; what i_k reads lives at k, and what is held once the loss has run   `_add_memory`

The least cost of these programs is a bound. Their solution names the runs of each interval; put in
a row they are a schedule, and where that needs most memory at a first run, there the next moment
is. If it is within the budget, it is optimal (`chain_bound`).

Known limits: from four moments on the programs may take minutes. Memory inside an interval is not
seen. HiGHS works with tolerances, so 1e-5 of the cost of all ops is taken off what it proves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rekindle.core import Problem, Schedule, simulate
from rekindle.solve.backends.mip import INF, Floats, Model, Outcome, solve_mip
from rekindle.solve.deadline import TimeLeft

_MARGIN = 1e-5  # of the cost of all ops
_SCALE = 100.0  # the cost of all ops in the program


@dataclass(frozen=True, slots=True)
class ChainBound:
    """What the programs prove: no schedule within the budget costs as much less than `extra` above
    the cost of all ops."""

    extra: int = 0
    infeasible: bool = False
    schedule: Schedule | None = None  # within the budget, if a solution was one
    moments: tuple[int, ...] = ()
    interrupted: bool = False


def chain_bound(
    problem: Problem, budget: int, first: int, time_limit_s: float, enough: int
) -> ChainBound:
    """Programs with more and more moments, from the first run of the op `first` on, until `enough`
    is proven or the time is up. Without dead ops."""
    time_left = TimeLeft(time_limit_s)
    total = sum(op.cost for op in problem.ops)
    chain = _Chain(problem, [first])
    best = 0
    while time_left() > 0:
        program = Program(problem, budget, chain.moments)
        unit = max(1, total) / _SCALE
        limit = enough / unit
        result = solve_mip(
            program.model,
            time_limit_s=time_left(),
            threads=1,
            enough=lambda _, bound, limit=limit: bound - _SCALE > limit + _SCALE * _MARGIN,  # type: ignore[misc]
        )
        if result.outcome is Outcome.INFEASIBLE:
            return ChainBound(0, True, None, tuple(chain.moments))
        if result.outcome is not Outcome.ERROR and result.bound > -INF:
            # Costs are whole numbers: what lies above one is the next one.
            proven = (result.bound - _SCALE) * unit - _MARGIN * total
            best = max(best, min(enough, math.ceil(proven - 1e-6)))
        moments = tuple(chain.moments)
        if result.interrupted:
            return ChainBound(best, False, None, moments, True)
        if best >= enough or result.x is None:
            return ChainBound(best, False, None, moments)
        schedule = program.schedule(result.x)
        trace = simulate(problem, schedule)
        if trace.peak <= budget:
            return ChainBound(best, False, schedule, moments)
        if not chain.extend(schedule, trace.memory, budget):
            return ChainBound(best, False, None, moments)
    return ChainBound(best, False, None, tuple(chain.moments))


class _Chain:
    """Moments, each an ancestor of the next."""

    def __init__(self, problem: Problem, moments: list[int]) -> None:
        self.problem, self.moments = problem, moments

    def extend(self, schedule: Schedule, memory: tuple[int, ...], budget: int) -> bool:
        """Takes in the first run with the most memory that is comparable with all moments; False
        if there is none above the budget."""
        first: dict[int, int] = {}
        for k, i in enumerate(schedule.ops):
            first.setdefault(i, memory[k])
        above = [i for i in first if first[i] > budget and i not in self.moments]
        comparable: set[int] | None = None
        for i in self.moments:
            near = ancestors(self.problem, i) | descendants(self.problem, i)
            comparable = near if comparable is None else comparable & near
        above = [i for i in above if comparable is None or i in comparable]
        if not above:
            return False
        new = max(above, key=lambda i: (first[i], -i))
        after = descendants(self.problem, new)
        at = next((k for k, i in enumerate(self.moments) if i in after), len(self.moments))
        self.moments.insert(at, new)
        return True


@dataclass(slots=True)
class Program:
    """The program for some moments, in the order of the chain."""

    problem: Problem
    budget: int
    moments: list[int]
    model: Model = field(init=False, default_factory=Model)
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        problem, model, m = self.problem, self.model, len(self.moments)
        resident = set(problem.resident)
        self._sizes = [0 if v in resident else x.size for v, x in enumerate(problem.values)]
        unit = max(1, sum(op.cost for op in problem.ops)) / _SCALE
        for op in problem.ops:
            for _ in range(m + 1):
                model.add_column(op.cost / unit, integer=True)
        for _ in range(2 * m * len(problem.ops) + m * len(problem.values)):
            model.add_column(integer=True)
        for k in range(1, m + 1):
            self._pin(k)
        for j in range(len(problem.ops)):
            self._add_op(j)
        for v, by in enumerate(problem.producer):
            if by >= 0:
                self._add_value(v, by)
        for k in range(1, m + 1):
            self._add_memory(k)

    # Columns.

    def r(self, j: int, q: int) -> int:
        return j * (len(self.moments) + 1) + q

    def x(self, j: int, k: int) -> int:
        m, n = len(self.moments), len(self.problem.ops)
        return n * (m + 1) + j * m + k - 1

    def y(self, j: int, k: int) -> int:
        return self.x(j, k) + len(self.problem.ops) * len(self.moments)

    def s(self, v: int, k: int) -> int:
        m, n = len(self.moments), len(self.problem.ops)
        return n * (3 * m + 1) + v * m + k - 1

    def _at_least(self, low: float, *entries: tuple[int, float]) -> None:
        columns = [column for column, _ in entries]
        self.model.add_row(low, INF, columns, [entry for _, entry in entries])

    def _pin(self, k: int) -> None:
        """What holds at moment k by its definition."""
        problem, lower, upper = self.problem, self.model.lower, self.model.upper
        i = self.moments[k - 1]
        before, after = ancestors(problem, i), descendants(problem, i)
        for j in before:
            lower[self.x(j, k)] = 1.0
        for j in (*after, i):
            upper[self.x(j, k)] = 0.0
            lower[self.y(j, k)] = 1.0
            for q in range(k):
                upper[self.r(j, q)] = 0.0
        lower[self.r(i, k)] = 1.0
        there = set(problem.ops[i].inputs)
        if problem.loss_op in before:
            there.update(problem.held)
        for v in there:
            if problem.producer[v] >= 0:
                lower[self.s(v, k)] = 1.0
        for v in problem.ops[i].outputs:
            upper[self.s(v, k)] = 0.0

    def _add_op(self, j: int) -> None:
        m, row = len(self.moments), self._at_least
        r, x, y, s = self.r, self.x, self.y, self.s
        op, producer = self.problem.ops[j], self.problem.producer
        every = [(r(j, q), 1.0) for q in range(m + 1)]
        row(1.0, *every)
        if op.once:
            row(-1.0, *((column, -1.0) for column, _ in every))
        for v in op.inputs:
            if (p := producer[v]) < 0:
                continue
            for q in range(m + 1):
                lives = [(s(v, q), 1.0)] if q else []
                row(0.0, (r(p, q), 1.0), (r(j, q), -1.0), *lives)
            for k in range(1, m + 1):
                row(0.0, (x(p, k), 1.0), (x(j, k), -1.0))
                row(0.0, (s(v, k), 1.0), (y(p, k), 1.0), (y(j, k), -1.0))
        for k in range(1, m + 1):
            row(0.0, (x(j, k), -1.0), *every[:k])
            row(0.0, (y(j, k), -1.0), *every[k:])
            row(1.0, (x(j, k), 1.0), (y(j, k), 1.0))
            row(0.0, (y(j, k), 1.0), (r(j, k), -1.0))
            if k < m:
                row(0.0, (x(j, k + 1), 1.0), (x(j, k), -1.0))
                row(0.0, (x(j, k), 1.0), (r(j, k), 1.0), (x(j, k + 1), -1.0))
                row(0.0, (y(j, k), 1.0), (y(j, k + 1), -1.0))

    def _add_value(self, v: int, by: int) -> None:
        for k in range(1, len(self.moments) + 1):
            earlier = [(self.s(v, k - 1), 1.0)] if k > 1 else []
            self._at_least(0.0, (self.s(v, k), -1.0), (self.r(by, k - 1), 1.0), *earlier)
            if v in self.problem.outputs:
                self._at_least(1.0, (self.s(v, k), 1.0), (self.y(by, k), 1.0))

    def _add_memory(self, k: int) -> None:
        op, sizes = self.problem.ops[self.moments[k - 1]], self._sizes
        room = self.budget - op.workspace - sum(sizes[v] for v in op.outputs)
        room += sum(sizes[out] for _, out in op.inplace)
        unit = max(1, self.budget)
        entries = [(self.s(v, k), size / unit) for v, size in enumerate(sizes) if size]
        columns = [column for column, _ in entries]
        self.model.add_row(-INF, room / unit, columns, [entry for _, entry in entries])

    def schedule(self, x: Floats) -> Schedule:
        """The runs of a solution, interval by interval, in listed order after the moment's own."""
        runs: list[int] = []
        for q in range(len(self.moments) + 1):
            here = [j for j in range(len(self.problem.ops)) if x[self.r(j, q)] > 0.5]
            if q:
                here.remove(self.moments[q - 1])
                here.insert(0, self.moments[q - 1])
            runs += here
        return Schedule(tuple(runs))


def ancestors(problem: Problem, op: int) -> set[int]:
    """The ops that must have run before it."""
    return _reach(op, lambda i: [problem.producer[v] for v in problem.ops[i].inputs])


def descendants(problem: Problem, op: int) -> set[int]:
    """The ops that cannot run before it."""
    return _reach(op, lambda i: [j for v in problem.ops[i].outputs for j in problem.readers[v]])


def _reach(op: int, near: Callable[[int], list[int]]) -> set[int]:
    found: set[int] = set()
    todo = [op]
    while todo:
        for j in near(todo.pop()):
            if j >= 0 and j not in found:
                found.add(j)
                todo.append(j)
    return found
