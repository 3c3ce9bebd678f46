"""Moccasin's retention intervals as a CP-SAT model; the formulation is in `moccasin`.

A *run* is one of the up to C executions of an op, a *copy* one output of one run. Steps are
numbered: with the order kept by the staged space, else freely.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rekindle.core import Schedule
from rekindle.solve.staged.staged_space import Stages

LARGE = 2**40  # larger totals are rounded: CP-SAT multiplies them within 64 bits

Precedence = Literal["copies", "reservoir"]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an op, as variables."""

    active: Any  # a literal, or True
    step: Any  # a number, or an expression
    stage: Any = None  # the variable that the step follows from, if not itself


@dataclass(slots=True)
class RetentionModel:
    """The constraint program: runs of ops, and the intervals over which values are kept."""

    stages: Stages
    max_runs: Sequence[int]  # per op: C_v
    keep_order: bool
    precedence: Precedence
    cp: Any = field(init=False)
    exact: bool = field(init=False)  # no size or cost was rounded
    cost_unit: int = field(init=False)
    end: int = field(init=False)  # the step after the last one
    runs: list[list[Run]] = field(init=False, default_factory=list)  # per op
    ends: dict[tuple[int, int], Any] = field(init=False, default_factory=dict)  # (value, run)
    _spans: dict[tuple[int, int], Any] = field(init=False, default_factory=dict)  # variable sizes

    def __post_init__(self) -> None:
        from ortools.sat.python import cp_model

        self.cp = cp_model.CpModel()
        problem = self.stages.problem
        # Without stages a step is a place in one sequence, and there are no more places than runs.
        num_runs = sum(
            1 if op.once else c for op, c in zip(problem.ops, self.max_runs, strict=True)
        )
        # Stage t and op i give step n t + i: those with i > t stand for nothing.
        self.end = len(problem.ops) ** 2 if self.keep_order else num_runs
        costs = [op.cost for op in problem.ops]
        self.cost_unit = _unit(costs, sum(costs) * max(self.max_runs, default=1))
        self.exact = all(cost % self.cost_unit == 0 for cost in costs)
        for i in range(len(problem.ops)):
            self._add_runs(i)
        if not self.keep_order:
            self.cp.add_all_different([run.step for runs in self.runs for run in runs])
        for v, by in enumerate(problem.producer):
            if by >= 0:
                self._add_copies(v, by)
        for j, op in enumerate(problem.ops):
            for v in op.inputs:
                if problem.producer[v] >= 0:
                    self._add_reads(v, j)
        self._add_lasting()

    # --- runs and copies ------------------------------------------------------------------------

    def _add_runs(self, i: int) -> None:
        """(7), (6): the first run takes place; later ones may, each after the one before."""
        num_ops = len(self.stages.problem.ops)
        again = [int(t) for t in self.stages.runs[:, i].nonzero()[0]]
        num_again = 0 if self.stages.problem.ops[i].once else self.max_runs[i] - 1
        if self.keep_order:
            runs = [Run(True, self._step(i, i))]
            # More copies than stages that may run the op would only be symmetric to each other.
            num_again = min(num_again, len(again))
        else:
            runs = [Run(True, self._number(0, self.end - 1, f"s{i}.0"))]
        for c in range(1, num_again + 1):
            active = self.cp.new_bool_var(f"a{i}.{c}")
            if self.keep_order:
                # The stage is the variable, so that its domain has hardly a gap.
                stage = self._one_of(again, f"t{i}.{c}")
                self.cp.add(stage == again[0]).only_enforce_if(~active)
                run = Run(active, num_ops * stage + i, stage)
            else:
                run = Run(active, self._number(0, self.end - 1, f"s{i}.{c}"))
            if c > 1:
                # Runs of one op are alike: an order among them takes the symmetry away.
                self.cp.add_implication(active, runs[-1].active)
            if c > 1 or not self.keep_order:
                self.cp.add(run.step > runs[-1].step).only_enforce_if(active)
            runs.append(run)
        self.runs.append(runs)

    def _step(self, t: int, i: int) -> int:
        """The number of the step of op i in stage t."""
        return len(self.stages.problem.ops) * t + i

    def _add_copies(self, v: int, by: int) -> None:
        """(2), (3): each copy is kept for a while, until the next one is made at the latest."""
        runs = self.runs[by]
        first = self._step(by, by) if self.keep_order else 0
        for c in range(len(runs)):
            if c > 0 and self.keep_order:
                first = self._step(int(self.stages.runs[:, by].argmax()), by)
            self.ends[v, c] = stop = self._number(first + 1, self.end, f"e{v}.{c}")
            if c + 1 < len(runs):
                following = runs[c + 1]
                self.cp.add(stop <= following.step).only_enforce_if(following.active)

    def _overwrites(self, j: int, v: int) -> bool:
        return any(source == v for source, _ in self.stages.problem.ops[j].inplace)

    # --- precedence -----------------------------------------------------------------------------

    def _add_reads(self, v: int, j: int) -> None:
        """(5): each run of op j finds a copy of v."""
        if self.precedence == "reservoir" and len(self.runs[self.stages.problem.producer[v]]) > 1:
            self._add_reservoir(v, j)
            return
        for c in range(len(self.runs[j])):
            self._read_a_copy(v, j, c)

    def _read_a_copy(self, v: int, j: int, c: int) -> None:
        reader = self.runs[j][c]
        late = 0 if self._overwrites(j, v) else 1
        makers = self.runs[self.stages.problem.producer[v]]
        if len(makers) == 1:
            self._if(reader.active, self.ends[v, 0] >= reader.step + late)
            if not self.keep_order:
                self._if(reader.active, makers[0].step < reader.step)
            return
        choices = []
        for d, maker in enumerate(makers):
            reads = self.cp.new_bool_var(f"r{j}.{c}.{v}.{d}")
            choices.append(reads)
            if maker.active is not True:
                self.cp.add_implication(reads, maker.active)
            if d > 0 or not self.keep_order:
                self._if(reads, maker.step < reader.step)
            self._if(reads, self.ends[v, d] >= reader.step + late)
            if self.stages.problem.ops[j].phase == "loss" and v in self.stages.problem.held:
                self._if(reads, self.ends[v, d] == self.end)
        if reader.active is True:
            self.cp.add_bool_or(choices)
        else:
            self.cp.add_bool_or([~reader.active, *choices])

    def _add_reservoir(self, v: int, j: int) -> None:
        """(10) on half-open intervals: the number of copies there never falls below that of the
        runs of op j that read just then. A copy counts from the step after it is made."""
        makers = self.runs[self.stages.problem.producer[v]]
        late = 0 if self._overwrites(j, v) else 1
        times, changes, actives = [], [], []
        for d, maker in enumerate(makers):
            # Twice as fine as steps: made before, read, dropped after.
            times += [2 * maker.step + 1, 2 * self.ends[v, d] + (1 if late == 0 else 0)]
            changes += [1, -1]
            actives += [maker.active, maker.active]
        for run in self.runs[j]:
            times += [2 * run.step, 2 * run.step + 1]
            changes += [-1, 1]
            actives += [run.active, run.active]
        copies = len(makers) + len(self.runs[j])
        self.cp.add_reservoir_constraint_with_active(times, changes, actives, 0, copies)
        loss = self.stages.problem.ops[j].phase == "loss" and v in self.stages.problem.held
        if loss:
            for c in range(len(self.runs[j])):
                self._read_a_copy(v, j, c)

    def _add_lasting(self) -> None:
        """The last copy of an output, and the held one of a held value, live to the end."""
        problem = self.stages.problem
        for v in problem.outputs:
            by = problem.producer[v]
            if by < 0:
                continue
            lasts = []
            for d, maker in enumerate(self.runs[by]):
                lasting = self.cp.new_bool_var(f"l{v}.{d}")
                self._if(lasting, self.ends[v, d] == self.end)
                if maker.active is not True:
                    self.cp.add_implication(lasting, maker.active)
                lasts.append(lasting)
            self.cp.add_bool_or(lasts)
        for v in problem.held:
            by = problem.producer[v]
            if by >= 0 and len(self.runs[by]) == 1:
                self.cp.add(self.ends[v, 0] == self.end)

    # --- memory and objectives ------------------------------------------------------------------

    def _add_memory(self, capacity: Any, unit: int) -> None:
        """(4): the sizes of the copies and the workspaces of the runs, at every step."""
        problem = self.stages.problem
        intervals, demands = [], []
        for (v, c), stop in self.ends.items():
            if self.stages.sizes[v] == 0:
                continue
            run = self.runs[problem.producer[v]][c]
            # A copy of size 0 is in no interval: it may be kept for ever.
            intervals.append(self._interval(run, stop, v, c))
            demands.append(-(-self.stages.sizes[v] // unit))
        for op, runs in zip(problem.ops, self.runs, strict=True):
            for run in runs if op.workspace else ():
                intervals.append(
                    self.cp.new_optional_fixed_size_interval_var(run.step, 1, run.active, "w")
                )
                demands.append(-(-op.workspace // unit))
        self.cp.add_cumulative(intervals, demands, capacity)

    def _interval(self, run: Run, stop: Any, v: int, c: int) -> Any:
        name = f"i{v}.{c}"
        if isinstance(run.step, int):
            return self.cp.new_interval_var(run.step, stop - run.step, stop, name)
        span = self._spans[v, c] = self.cp.new_int_var(1, self.end, f"z{v}.{c}")
        return self.cp.new_optional_interval_var(run.step, span, stop, run.active, name)

    def minimize_peak(self, keep_all_peak: int) -> None:
        """Phase 1 (12), (13): the peak, or the budget where the peak is within it."""
        unit, low = self._memory_unit()
        # Each size may be rounded up by a unit, hence one more unit per copy.
        high = max(low, -(-keep_all_peak // unit) + len(self.ends))
        peak = self.cp.new_int_var(low, high, "peak")
        self._add_memory(peak, unit)
        self.cp.minimize(peak)

    def minimize_cost(self) -> None:
        """Phase 2 (1): the cost of the runs again, in `cost_unit`s."""
        unit, capacity = self._memory_unit()
        self._add_memory(capacity, unit)
        ops = self.stages.problem.ops
        terms = [
            (ops[i].cost // self.cost_unit, run.active)
            for i, runs in enumerate(self.runs)
            for run in runs[1:]
        ]
        self.cp.minimize(sum(cost * active for cost, active in terms))

    def _memory_unit(self) -> tuple[int, int]:
        """The unit of memory, and the budget in it."""
        stages = self.stages
        sizes = [*stages.sizes, *(op.workspace for op in stages.problem.ops)]
        unit = _unit(sizes, max(stages.budget, sum(stages.sizes)))
        self.exact &= all(size % unit == 0 for size in sizes)
        return unit, stages.budget // unit

    # --- solutions and hints --------------------------------------------------------------------

    def schedule(self, value: Callable[[Any], int]) -> Schedule:
        """The schedule of a solution, given how an expression or a literal is evaluated."""
        placed = [
            (run.step if isinstance(run.step, int) else value(run.step), i)
            for i, runs in enumerate(self.runs)
            for run in runs
            if run.active is True or value(run.active)
        ]
        return Schedule(tuple(i for _, i in sorted(placed)))

    def hint(self, schedule: Schedule) -> None:
        """Suggests a schedule; runs that are no part of the model are left out of it."""
        steps = self._places(schedule)
        if steps is None:
            return
        problem = self.stages.problem
        made: dict[int, list[int]] = {}
        stop: dict[tuple[int, int], int] = {}
        for k, i in steps:
            op = problem.ops[i]
            for v in op.inputs:
                if (by := problem.producer[v]) >= 0 and by in made:
                    stop[v, len(made[by]) - 1] = k + (0 if self._overwrites(i, v) else 1)
            made.setdefault(i, []).append(k)
            for v in op.outputs:
                stop[v, len(made[i]) - 1] = k + 1
        for v in {*problem.outputs, *problem.held}:
            if (by := problem.producer[v]) >= 0:
                stop[v, len(made[by]) - 1] = self.end
        for i, runs in enumerate(self.runs):
            for c, run in enumerate(runs):
                here = c < len(made[i])
                if run.active is not True:
                    self.cp.add_hint(run.active, here)
                if here and run.stage is not None:
                    self.cp.add_hint(run.stage, made[i][c] // len(self.runs))
                elif here and not isinstance(run.step, int):
                    self.cp.add_hint(run.step, made[i][c])
                for v in problem.ops[i].outputs if here else ():
                    self.cp.add_hint(self.ends[v, c], stop[v, c])
                    if (v, c) in self._spans:
                        self.cp.add_hint(self._spans[v, c], stop[v, c] - made[i][c])

    def _places(self, schedule: Schedule) -> list[tuple[int, int]] | None:
        """(step, op) of the schedule in the model's steps; None where it does not fit in."""
        # A schedule that does not fit into the model gives no hint at all.
        counts: dict[int, int] = {}
        for i in schedule.ops:
            counts[i] = counts.get(i, 0) + 1
        if any(counts.get(i, 0) < 1 for i in range(len(self.runs))):
            return None
        if any(count > self.max_runs[i] for i, count in counts.items()):
            return None
        if not self.keep_order:
            return list(enumerate(schedule.ops))
        found = []
        stage = 0
        for i in schedule.ops:
            if i == stage:
                found.append((self._step(stage, i), i))
                stage += 1
                continue
            # In a row of slack stages the runs stand in the first one.
            place = next((t for t in range(stage, i, -1) if self.stages.runs[t, i]), None)
            if place is not None:
                found.append((self._step(place, i), i))
        return sorted(set(found))

    # --- small pieces ---------------------------------------------------------------------------

    def _number(self, low: int, high: int, name: str) -> Any:
        return self.cp.new_int_var(low, high, name)

    def _one_of(self, numbers: Sequence[int], name: str) -> Any:
        from ortools.sat.python import cp_model

        return self.cp.new_int_var_from_domain(cp_model.Domain.from_values(list(numbers)), name)

    def _if(self, literal: Any, relation: Any) -> None:
        """The relation, wherever the literal holds; a relation between numbers is decided now."""
        if relation is True:
            return
        if relation is False:
            self.cp.add_bool_or([] if literal is True else [~literal])
            return
        constraint = self.cp.add(relation)
        if literal is not True:
            constraint.only_enforce_if(literal)


def _unit(numbers: Sequence[int], total: int) -> int:
    """What the numbers are counted in: their common divisor, or more where the total is large."""
    common = max(1, math.gcd(*numbers))
    return max(common, -(-total // LARGE))
