"""The Checkmate model on the staged space, as rows and columns.

Checkmate (Jain et al. 2020) in the form of rk-Checkmate (Rockmate, App. B): ops with several
outputs and workspace, a budget for the peak and one for what is saved across the loss. The
variables that say when a value is freed are replaced by those that say while it is kept, which
needs no product of hazards and gives the tight relaxation of the disaggregated form:

- R[t, i], binary: op i runs again in stage t; R[t, t] = 1.                       `_add_runs`
- For each value, its events in order: the runs that make it and the runs that read it. K[e] in
  [0, 1]: it is kept from event e to the next one. K at a stage's begin is Checkmate's S, the drop
  from one K to the next at a reading run its FREE.                               `_add_value`
  - after a run that makes it:  K <= K before + R, and K before + R <= 1 (a copy that is
    recomputed need not be kept until then);
  - before a run that reads it: K before >= R;  after it: K <= K before;
  - to the end for an output; from the loss to the end for a held value.
  With binary R the least K is 0 or 1, so K need not be declared integer.
- Memory at each step (t, i): what is kept across it, the outputs and workspace of the run, at most
  the budget. An input that may be overwritten in place counts if it is kept after the step, not
  before it: exactly the simulator's saving.                                      `memory_row`
- Saved: what is kept across the loss op, without its own outputs.                `save_row`
- Objective: sum of cost R, scaled by the mean cost of an op.

Values of size 0 need no variables: they are kept for ever. Memory rows exist only in tight stages
(see `staged_space`). Rows are dense on purpose: written with running totals U[t, i] HiGHS is
slower, as its knapsack cuts no longer see the items.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rekindle.core import Schedule
from rekindle.solve.backends.highs import GrowingLP
from rekindle.solve.backends.mip import INF, LPResult, Model, Outcome
from rekindle.solve.deadline import TimeLeft
from rekindle.solve.staged.staged_space import Bools, Floats, Ints, Stages

CONSTANT = -1  # the column of what is there in every schedule
_VIOLATED = 1e-6  # of the budget
_MAX_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Covers:
    """Who takes how much memory over which steps: size * x[column] from first to last."""

    column: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    size: Floats  # in parts of the budget
    value: NDArray[np.int64]
    kept: Bools  # kept across the steps; else made in its one step


@dataclass(slots=True)
class StagedModel:
    """The rows and columns of Checkmate's MILP."""

    stages: Stages
    time_left: TimeLeft = field(default_factory=lambda: TimeLeft(math.inf))  # else OutOfTime
    model: Model = field(default_factory=Model)
    steps: list[tuple[int, int]] = field(init=False)
    step_at: Ints = field(init=False)  # [t, i]: the step, or -1
    run_column: Ints = field(init=False)  # [t, i], or -1
    scale: float = field(init=False)  # cost units per unit of the objective
    _limit: float = field(init=False)  # what memory can reach, in parts of the budget
    covers: Covers = field(init=False)
    _bindable: Ints = field(init=False)  # steps before k in tight stages, counted
    _parts: list[tuple[int, int, int, float, int, bool]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        problem = self.stages.problem
        self.steps = self.stages.steps
        num_ops = len(problem.ops)
        self.step_at = np.full((num_ops, num_ops), -1, dtype=np.int64)
        for k, (t, i) in enumerate(self.steps):
            self.step_at[t, i] = k
        # Running counts, so that "is a tight stage between two steps" is one subtraction.
        tight = np.array([self.stages.tight[t] for t, _ in self.steps], dtype=np.int64)
        self._bindable = np.concatenate(([0], np.cumsum(tight)))
        # HiGHS's tolerances are absolute, so costs are in mean costs of an op and bytes in budgets.
        self.scale = max(1.0, sum(op.cost for op in problem.ops) / num_ops)
        # Memory is a sum of whole sizes: the rest of the budget above the grid is out of reach.
        grid = max(1, math.gcd(*self.stages.sizes, *(op.workspace for op in problem.ops)))
        self._limit = self.stages.budget // grid * grid / self.stages.budget
        self._add_runs()
        for v, by in enumerate(problem.producer):
            if by >= 0 and self.stages.sizes[v] > 0:
                self.time_left.check()
                self._add_value(v, by)
        columns = list(zip(*self._parts, strict=True)) or [()] * 6
        self.covers = Covers(
            np.array(columns[0], dtype=np.int64),
            np.array(columns[1], dtype=np.int64),
            np.array(columns[2], dtype=np.int64),
            np.array(columns[3], dtype=np.float64),
            np.array(columns[4], dtype=np.int64),
            np.array(columns[5], dtype=bool),
        )
        self._parts.clear()

    def _add_runs(self) -> None:
        ops = self.stages.problem.ops
        self.run_column = np.full_like(self.step_at, -1)
        for t, i in self.steps:
            if i < t:
                cost = ops[i].cost / self.scale
                self.run_column[t, i] = self.model.add_column(cost, integer=True)

    def _add_value(self, v: int, by: int) -> None:
        """The events of one value, the K between them, and what they cover."""
        problem, model = self.stages.problem, self.model
        events = self._events(v, by)
        forever = bool(self.stages.stays[v])
        end = len(self.steps) - 1
        kept, since = CONSTANT, 0  # the column of K now, and the first step it covers
        for e, k in enumerate(events):
            t, i = self.steps[k]
            run = int(self.run_column[t, i])
            last = e == len(events) - 1
            if i == by:
                self._cover(run, k, k, v, kept=False)
                if t > by:
                    model.add_row(-INF, 1.0, (kept, run), (1.0, 1.0))
                    self._cover(kept, since, k, v)
                if last and not forever:
                    return
                before = kept
                kept, since = model.add_column(), k + 1
                if t > by:
                    model.add_row(-INF, 0.0, (kept, before, run), (1.0, -1.0, -1.0))
                continue
            if run < 0:
                model.lower[kept] = 1.0
            else:
                model.add_row(0.0, INF, (kept, run), (1.0, -1.0))
            overwritten = any(v == source for source, _ in problem.ops[i].inplace)
            after = k if overwritten else k + 1
            if last and not forever:
                self._cover(kept, since, after - 1, v)
                return
            until = end if last else events[e + 1]
            made_next = not last and self.steps[until][1] == by
            if made_next or self._bindable[until + 1] > self._bindable[after]:
                self._cover(kept, since, after - 1, v)
                before, kept, since = kept, model.add_column(), after
                model.add_row(0.0, INF, (before, kept), (1.0, -1.0))
        model.lower[kept] = 1.0
        self._cover(kept, since, end, v)

    def _events(self, v: int, by: int) -> list[int]:
        """The steps that make or read the value, in order; of a held one, up to the loss."""
        problem = self.stages.problem
        steps = self.step_at[:, [by, *problem.readers[v]]]
        events = sorted(int(k) for k in steps[steps >= 0])
        loss = problem.loss_op
        if loss is not None and v in problem.held:
            final = int(self.step_at[loss, loss])
            events = [k for k in events if k <= final]
        return events

    def _cover(self, column: int, first: int, last: int, v: int, *, kept: bool = True) -> None:
        if first <= last:
            size = self.stages.sizes[v] / self.stages.budget
            self._parts.append((column, first, last, size, v, kept))

    # --- memory ---------------------------------------------------------------------------------

    def memory_steps(self) -> list[int]:
        """The steps whose memory row can be violated at all."""
        # Everything kept and run: a row that holds even then can be left out.
        full = np.ones(len(self.model.cost))
        return [
            k
            for k, memory in enumerate(self.memory(full))
            if memory > 1.0 and self.stages.tight[self.steps[k][0]]
        ]

    def memory(self, x: Floats) -> Floats:
        """Per step, in parts of the budget."""
        covers = self.covers
        # A difference array: each cover adds at its first step and takes off after its last one.
        amount = covers.size * np.where(covers.column >= 0, x[covers.column], 1.0)
        change = np.zeros(len(self.steps) + 1)
        np.add.at(change, covers.first, amount)
        np.add.at(change, covers.last + 1, -amount)
        total: Floats = np.cumsum(change)[:-1]
        for k, (t, i) in enumerate(self.steps):
            if workspace := self.stages.problem.ops[i].workspace:
                run = 1.0 if t == i else x[self.run_column[t, i]]
                total[k] += run * workspace / self.stages.budget
        return total

    def memory_row(self, k: int) -> tuple[float, NDArray[np.int32], Floats]:
        """The right-hand side, columns and entries of the memory row of step k."""
        covers = self.covers
        here = np.flatnonzero((covers.first <= k) & (covers.last >= k))
        t, i = self.steps[k]
        workspace = self.stages.problem.ops[i].workspace / self.stages.budget
        columns = np.append(covers.column[here], self.run_column[t, i])
        return _merged(columns, np.append(covers.size[here], workspace), self._limit)

    def save_row(self) -> tuple[float, NDArray[np.int32], Floats] | None:
        """The row that bounds what is saved while the loss op runs; None where there is none."""
        stages, covers = self.stages, self.covers
        loss = stages.problem.loss_op
        if loss is None or stages.save_budget is None:
            return None
        k = int(self.step_at[loss, loss])
        here = np.flatnonzero((covers.first <= k) & (covers.last >= k) & covers.kept)
        limit = stages.save_budget / stages.budget
        return _merged(covers.column[here], covers.size[here], limit)

    def with_all_rows(self, margin: float = 0.0) -> Model:
        """The model with every memory row that can bind, lowered by a part of the budget."""
        rows = []
        for k in self.memory_steps():
            self.time_left.check()
            rows.append(self.memory_row(k))
        if (save := self.save_row()) is not None:
            rows.append(save)
        for limit, columns, entries in rows:
            self.model.add_row(-INF, limit - margin, columns.tolist(), entries.tolist())
        return self.model

    # --- the relaxation -------------------------------------------------------------------------

    def relax(self) -> LPResult:
        """The LP optimum, memory rows added as they are violated.

        Stopped early, it answers with `STOPPED` and no numbers."""
        lp = GrowingLP(self.model)
        bindable = self.memory_steps()
        if (save := self.save_row()) is not None:
            lp.add_row(-INF, *save)
        waiting = set(bindable)
        # First the rows of first runs, one for each stage; others once they are violated.
        new = [k for k in bindable if self.steps[k][0] == self.steps[k][1]]
        for _ in range(_MAX_ROUNDS):
            for k in new:
                self.time_left.check()
                limit, columns, entries = self.memory_row(k)
                lp.add_row(-INF, limit, columns, entries)
            waiting.difference_update(new)
            answer = lp.solve(self.time_left())
            if answer.outcome is not Outcome.OPTIMAL or answer.interrupted or not waiting:
                return answer
            assert answer.x is not None
            new = self._worst(self.memory(answer.x), waiting)
            if not new:
                return answer
        return answer

    def _worst(self, memory: Floats, waiting: set[int]) -> list[int]:
        """Of each stage the step that is most above the budget."""
        worst: dict[int, int] = {}
        for k in waiting:
            t = self.steps[k][0]
            if memory[k] > 1.0 + _VIOLATED and (t not in worst or memory[k] > memory[worst[t]]):
                worst[t] = k
        return list(worst.values())

    # --- solutions ------------------------------------------------------------------------------

    def runs(self, x: Floats) -> Bools:
        """The runs again that a solution names."""
        found: Bools = (self.run_column >= 0) & (x[self.run_column] > 0.5)
        return found

    def schedule(self, x: Floats) -> Schedule:
        return self.stages.schedule(self.runs(x))

    def kept_at_stages(self, x: Floats) -> Floats:
        """[t, v]: how far value v is kept when stage t begins (Checkmate's S)."""
        problem, covers = self.stages.problem, self.covers
        kept = np.zeros((len(problem.ops), len(problem.values)))
        begins = [int(self.step_at[t][self.step_at[t] >= 0].min()) for t in range(len(problem.ops))]
        amount = np.where(covers.column >= 0, x[covers.column], 1.0)
        stage_of = np.searchsorted(begins, np.arange(len(self.steps) + 1))
        for v, by in enumerate(problem.producer):
            if by >= 0 and self.stages.sizes[v] == 0:
                kept[by + 1 :, v] = 1.0
        for column in np.flatnonzero(covers.kept):
            first, last = stage_of[covers.first[column]], stage_of[covers.last[column] + 1]
            kept[first:last, covers.value[column]] = amount[column]
        return kept


def _merged(
    columns: NDArray[np.int64], sizes: Floats, limit: float
) -> tuple[float, NDArray[np.int32], Floats]:
    """Entries of one column added up; constants moved to the right-hand side."""
    constant = float(sizes[columns == CONSTANT].sum())
    found, where = np.unique(columns[columns >= 0], return_inverse=True)
    # A run stands in a row for each value that it makes and for its workspace; HiGHS wants one
    # entry of each column.
    entries: Floats = np.bincount(where, weights=sizes[columns >= 0], minlength=len(found)).astype(
        np.float64
    )
    keep = entries > 0
    return limit - constant, found[keep].astype(np.int32), entries[keep]
