"""The staged space of schedules, and what can be left out of it without loss.

A staged schedule keeps the listed order (Checkmate, Jain et al. 2020; Moccasin, Sec. 2.3): stage t
runs some of the ops 0 .. t-1, in listed order, and ends with the first run of op t. `checkmate`,
`checkmate-lp` and `moccasin` (with the order kept) search this space. Two rules belong to it: an
op runs at most once per stage, and an op that makes a held value does not run again after the
loss.

`Stages.of` says which runs (t, i) a method has to consider at all:
- a run must serve: one of its outputs is read at stage t or later by a run that is itself
  considered, or is an output of the problem;
- with a cap on the extra cost, a run and the cheapest chain of runs that leads from it to a first
  run (its own cost, then each reader that must run again too) stay within the cap: a schedule
  whose extra cost is within the cap has no other runs;
- a stage is slack if all values that could be alive in it fit together. In a row of slack stages
  nothing has to be dropped, so what runs again in it may do so in its first stage already.
Each rule only removes schedules for which an equally cheap one within the budget remains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rekindle.core import Problem, Schedule

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# More than any cost (`base.LARGEST_COSTS`), and a cost may be added to it in 64 bits.
UNCAPPED = 2**62


@dataclass(frozen=True, slots=True)
class Stages:
    """The runs to consider, for one problem, budget and cap."""

    problem: Problem
    budget: int
    save_budget: int | None  # on what is alive while the loss op runs, without its outputs
    cap: int  # on the extra cost
    complete: bool  # no run was left out because of the cap
    sizes: tuple[int, ...]  # per value; 0 where it is resident
    runs: Bools  # [t, i]: op i may run again in stage t > i
    tight: Bools  # [t]: memory may bind in the stage
    stays: Bools  # [v]: alive at the end of every schedule

    @staticmethod
    def of(
        problem: Problem, budget: int, *, cap: int = UNCAPPED, save_budget: int | None = None
    ) -> "Stages":
        resident = set(problem.resident)
        sizes = tuple(0 if v in resident else value.size for v, value in enumerate(problem.values))
        stays = np.zeros(len(sizes), dtype=bool)
        stays[[v for v in {*problem.outputs, *problem.held} if v not in resident]] = True
        chain_cost = _chain_cost(problem)
        again = _may_run_again(problem)
        stages = Stages(
            problem=problem,
            budget=budget,
            save_budget=save_budget,
            cap=cap,
            # Runs without a chain to a first run serve nothing, so to leave them out loses nothing.
            complete=not bool(np.any(again & (chain_cost > cap) & (chain_cost < UNCAPPED))),
            sizes=sizes,
            runs=again & (chain_cost <= cap) & (chain_cost < UNCAPPED),
            tight=np.ones(len(problem.ops), dtype=bool),
            stays=stays,
        )
        return stages._reduced()

    def only(self, runs: Bools) -> "Stages":
        """The same without the runs that `runs` does not name."""
        return replace(self, runs=self.runs & runs)._reduced()

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Every (t, i) that may run, in order; (t, t) always does."""
        found = self.runs.copy()
        np.fill_diagonal(found, True)
        return [(int(t), int(i)) for t, i in np.argwhere(found)]

    def schedule(self, again: Bools) -> Schedule:
        """First runs, and the runs again that `again` [t, i] names."""
        found = again.copy()
        np.fill_diagonal(found, True)
        return Schedule(tuple(int(i) for _, i in np.argwhere(found)))

    def _reduced(self) -> "Stages":
        runs = self.runs.copy()
        count = -1
        tight = self.tight
        # A run that falls away may have been the last reader of another, and a stage with less in
        # it may become slack: again until nothing changes.
        while count != (count := int(runs.sum())):
            last_use = _last_use(self.problem, runs, self.stays)
            for i, op in enumerate(self.problem.ops):
                runs[max(last_use[v] for v in op.outputs) + 1 :, i] = False
            tight = self._tight(runs, last_use)
            slack_before = np.concatenate(([True], ~tight[:-1]))
            runs[~tight & slack_before] = False
        return replace(self, runs=runs, tight=tight)

    def _tight(self, runs: Bools, last_use: Sequence[int]) -> Bools:
        """Stages in which all that could be alive at once, with the largest workspace, is above
        the budget; the loss stage also where that is above the budget for what is saved."""
        ops = self.problem.ops
        last_run = _last_run(runs)
        alive = np.zeros(len(ops) + 1, dtype=np.int64)
        for v, by in enumerate(self.problem.producer):
            if by >= 0:  # each run that makes the value makes it alive, read or not
                alive[by] += self.sizes[v]
                alive[min(max(last_use[v], last_run[by]), len(ops) - 1) + 1] -= self.sizes[v]
        total = np.cumsum(alive)[:-1]
        # A run may move to an earlier stage of a slack row: its workspace counts in all.
        workspace = np.zeros(len(ops), dtype=np.int64)
        for i, op in enumerate(ops):
            if op.workspace:
                np.maximum(
                    workspace[i : last_run[i] + 1],
                    op.workspace,
                    out=workspace[i : last_run[i] + 1],
                )
        tight: Bools = total + workspace > self.budget
        loss = self.problem.loss_op
        if loss is not None and self.save_budget is not None:
            tight[loss] |= total[loss] > self.save_budget
        return tight


def staged_like(problem: Problem, schedule: Schedule) -> Schedule | None:
    """The staged schedule with the same runs in each stage, or None where the first runs of the
    schedule do not keep the listed order."""
    stages: list[set[int]] = []
    current: set[int] = set()
    for i in schedule.ops:
        # A first run ahead of its turn; a run again before its first run cannot be.
        if i > len(stages):
            return None
        if i < len(stages):
            current.add(i)
        else:
            stages.append(current)
            current = set()
    if len(stages) < len(problem.ops):
        return None
    steps = [i for t, again in enumerate(stages) for i in (*sorted(again), t)]
    return without_idle_runs(problem, Schedule(tuple(steps)))


def runs_for_kept(problem: Problem, kept: Sequence[set[int]]) -> Schedule:
    """The staged schedule that has the values kept[t] in memory when stage t begins.

    Per stage, backwards: an op runs if it is op t, or makes what a later run of the stage or the
    next stage's kept values need and what was not kept. Runs that turn out to serve nothing go.
    """
    num_ops, producer = len(problem.ops), problem.producer
    there_anyway = set(problem.resident)  # and what can be made once only
    again = _may_run_again(problem)
    steps: list[int] = []
    for t in range(num_ops):
        there_anyway.update(v for i in range(t) if not again[t, i] for v in problem.ops[i].outputs)
        here = kept[t] | there_anyway
        there = kept[t + 1] if t + 1 < num_ops else set()
        needed = {t, *(producer[v] for v in there - here)}
        stage = []
        for i in range(t, -1, -1):
            if i in needed:
                stage.append(i)
                needed.update(producer[v] for v in problem.ops[i].inputs if v not in here)
        steps.extend(reversed(stage))
    return without_idle_runs(problem, Schedule(tuple(steps)))


def without_idle_runs(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule without the runs again whose outputs nothing reads; first runs stay."""
    seen: set[int] = set()
    first = []
    for i in schedule.ops:
        first.append(i not in seen)
        seen.add(i)
    wanted = set(problem.outputs)
    left = []
    for i, is_first in zip(reversed(schedule.ops), reversed(first), strict=True):
        op = problem.ops[i]
        if is_first or not wanted.isdisjoint(op.outputs):
            left.append(i)
            wanted.difference_update(op.outputs)
            wanted.update(op.inputs)
    return Schedule(tuple(reversed(left)))


def _may_run_again(problem: Problem) -> Bools:
    num_ops = len(problem.ops)
    again = np.tri(num_ops, num_ops, -1, dtype=bool)
    held, loss = set(problem.held), problem.loss_op
    for i, op in enumerate(problem.ops):
        if op.once:
            again[:, i] = False
        elif loss is not None and not held.isdisjoint(op.outputs):
            again[loss + 1 :, i] = False
    return again


def _chain_cost(problem: Problem) -> Ints:
    """[t, i]: what a run of op i in stage t costs with the cheapest chain of runs to a first run
    at stage t or later, or to an output; UNCAPPED where there is none."""
    num_ops = len(problem.ops)
    kept = {*problem.outputs, *problem.held}
    cost = np.full((num_ops, num_ops), UNCAPPED, dtype=np.int64)  # [i, t] while it is filled
    # Backwards, so that the readers of op i, which stand behind it, are there already.
    for i in range(num_ops - 1, -1, -1):
        op = problem.ops[i]
        onward = np.full(num_ops, UNCAPPED, dtype=np.int64)
        for v in op.outputs:
            if v in kept:
                onward[:] = 0
            for j in problem.readers[v]:
                onward[: j + 1] = 0
                np.minimum(onward, cost[j], out=onward)
        if not op.once:
            np.minimum(onward + op.cost, UNCAPPED, out=cost[i])
    return np.ascontiguousarray(cost.T)


def _last_run(runs: Bools) -> list[int]:
    """Per op: the last stage in which it may run."""
    num_ops = len(runs)
    # The first run of op i ends stage i, so an op that never runs again has that as its last.
    last = np.where(runs.any(axis=0), num_ops - 1 - runs[::-1].argmax(axis=0), np.arange(num_ops))
    return [int(t) for t in last]


def _last_use(problem: Problem, runs: Bools, stays: Bools) -> list[int]:
    """Per value: the last stage in which a considered run may read it; -1 where none does."""
    last_run = _last_run(runs)
    return [
        len(problem.ops) if stays[v] else max((last_run[j] for j in readers), default=-1)
        for v, readers in enumerate(problem.readers)
    ]
