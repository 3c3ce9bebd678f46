"""`moccasin`: retention intervals in constraint programming (Bartan et al. 2023), with CP-SAT.

Each op may run up to C times (2 by default); each run gives each of its outputs an interval
[s, e): made at step s, kept up to step e - 1. Numbers in brackets are the paper's equations.

- a[c]: run c takes place; the first one always does (7).                `RetentionModel._add_runs`
- s[c]: its step. With the order kept (Sec. 2.3) the steps are those of the staged space
  (`stages`): the first run of op t ends stage t, and a later run of op i stands at place i of some
  stage. Without it, any step up to the number of runs, all different (6).
- e[v, c] <= s[c + 1] (3): the next copy takes over.                               `_add_copies`
- Every run finds its inputs (5): for each input some copy with s_u + 1 <= s_v <= e_u - 1.
  As the paper's reservoir (10) on half-open intervals, or, by default, with one literal per copy
  that may be read, which propagates better.                      `_read_a_copy`, `_add_reservoir`
  Where the op may overwrite the input, s_v <= e_u is enough: the simulator's saving.
- An output's last copy, and the copy of a held value that the loss reads, live to the end.
- Memory (4): the intervals' sizes and the workspace of the runs are cumulative.   `_add_memory`
- Objective (1): the cost of the runs.

Phase 1 (Sec. 2.4) minimizes max(peak, budget) from keep-all; phase 2 minimizes the cost from there.
With the order kept, a schedule that is known bounds the extra cost, and that bounds which runs can
be part of a cheaper one: phase 2 starts again with fewer steps when that halves the model
(`stages`).

The space: at most C runs per op; with the order kept, in stages. "Optimal" and the bound hold for
that space. Sizes and costs beyond 2^40 units are rounded to the safe side, and nothing is proven
where that loses anything.
"""

import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.solve.base import trivial_floor
from rekindle.solve.checkmate import StagedResult, staged_solution
from rekindle.solve.clock import TimeLeft
from rekindle.solve.progress import Progress, report
from rekindle.solve.retention_model import Precedence, RetentionModel
from rekindle.solve.stages import UNCAPPED, Stages, staged_like


@dataclass(frozen=True, slots=True)
class Moccasin:
    max_runs: int = 2  # C: how often an op may run
    keep_order: bool = True
    precedence: Precedence = "copies"
    workers: int = 8  # of CP-SAT's portfolio; they take turns where there are fewer cores

    name: ClassVar[str] = "moccasin"
    requires: ClassVar[tuple[str, ...]] = ("ortools",)
    exact: ClassVar[bool] = True

    def accepts(self, problem: Problem) -> str | None:
        return None

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        search = _Search(self, problem, budget, seed, TimeLeft(time_limit_s))
        result = search.run(warm_start)
        order = "that keep the listed order, in stages" if self.keep_order else "in any order"
        space = f"schedules {order}, with at most {self.max_runs} runs of an op"
        return staged_solution(problem, budget, result, self.name, warm_start, space)


@dataclass(slots=True)
class _Search:
    options: Moccasin
    problem: Problem
    budget: int
    seed: int
    time_left: TimeLeft
    total: int = field(init=False)
    best: Schedule | None = field(init=False, default=None)
    best_extra: int = field(init=False, default=UNCAPPED)
    least_extra: int = field(init=False, default=0)
    stopped_by: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.total = sum(op.cost for op in self.problem.ops)

    def run(self, warm_start: Schedule | None) -> StagedResult:
        if self.budget < trivial_floor(self.problem):
            return StagedResult(None, self.total, False, True, "proof")
        self.offer(keep_all(self.problem))
        if warm_start is not None:
            inside = warm_start
            if self.options.keep_order:
                inside = staged_like(self.problem, warm_start) or keep_all(self.problem)
            if max(simulate(self.problem, inside).runs) <= self.options.max_runs:
                self.offer(inside)
        infeasible = False
        if self.best is None:
            infeasible = self._phase_1()
        while self.best is not None and self.least_extra < self.best_extra and not self.stopped_by:
            self._phase_2()
        optimal = self.best is not None and self.least_extra >= self.best_extra
        if not optimal and not infeasible and not self.stopped_by:
            self.stopped_by = "time limit"
        return StagedResult(
            schedule=self.best,
            bound=self.total + min(self.least_extra, self.best_extra),
            optimal=optimal,
            infeasible=infeasible,
            stopped_by=self.stopped_by or "proof",
        )

    def _phase_1(self) -> bool:
        """Finds a schedule within the budget; True if it is proven that there is none."""
        model = self._model(UNCAPPED)
        model.minimize_peak(simulate(self.problem, keep_all(self.problem)).peak)
        model.hint(keep_all(self.problem))
        outcome = self._solve(model, lambda: self.best is not None)
        return self.best is None and outcome.proven and model.exact

    def _phase_2(self) -> None:
        """Improves the best schedule until it is proven, the time is up, or the model that is
        enough for what is cheaper has become much smaller."""
        assert self.best is not None
        model = self._model(self.best_extra)
        model.minimize_cost()
        model.hint(self.best)
        size = _size(model.stages)
        outcome = self._solve(model, lambda: 2 * _size(self._stages(self.best_extra)) < size)
        self.least_extra = max(
            self.least_extra, min(outcome.bound * model.cost_unit, self.best_extra)
        )
        if outcome.proven and model.exact:
            self.least_extra = self.best_extra
        elif outcome.interrupted:
            self.stopped_by = "interrupt"
        elif not outcome.ended:
            self.stopped_by = "time limit"

    def _stages(self, cap: int) -> Stages:
        return Stages.of(
            self.problem, self.budget, cap=cap if self.options.keep_order else UNCAPPED
        )

    def _model(self, cap: int) -> RetentionModel:
        options = self.options
        return RetentionModel(
            self._stages(cap), options.max_runs, options.keep_order, options.precedence
        )

    def _solve(self, model: RetentionModel, enough: Callable[[], bool]) -> "_Outcome":
        def hear(schedule: Schedule) -> bool:
            before = self.best_extra
            self.offer(schedule)
            return self.best_extra < before and enough()

        outcome = _drive(model, self.options.workers, self.seed, self.time_left, hear)
        if outcome.interrupted:
            self.stopped_by = "interrupt"
        return outcome

    def offer(self, schedule: Schedule) -> None:
        """Keeps the schedule if it is within the budget and the cheapest so far."""
        trace = simulate(self.problem, schedule)
        extra = trace.cost - self.total
        if trace.peak <= self.budget and extra < self.best_extra:
            self.best, self.best_extra = schedule, extra
            self.tell()

    def tell(self) -> None:
        report(
            Progress(
                solver=self.options.name,
                elapsed_s=self.time_left.elapsed_s,
                cost=self.total + self.best_extra if self.best is not None else None,
                bound=float(self.total + min(self.least_extra, self.best_extra)),
            )
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    proven: bool  # the objective is optimal, or there is no solution
    ended: bool  # by `hear`
    interrupted: bool
    bound: int  # on the objective; 0 where none is known


def _size(stages: Stages) -> int:
    return int(stages.runs.sum())


def _drive(
    model: RetentionModel,
    workers: int,
    seed: int,
    time_left: TimeLeft,
    hear: Callable[[Schedule], bool],
) -> _Outcome:
    """Runs CP-SAT in a second thread, so that Ctrl-C reaches Python at once. `hear` gets each
    schedule, in the caller's thread, and may end the search by answering True."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = max(0.01, time_left())
    parameters.num_workers = workers
    parameters.interleave_search = True  # the same seed gives the same search
    parameters.random_seed = seed % 2**31
    parameters.catch_sigint_signal = False
    found: queue.SimpleQueue[Schedule] = queue.SimpleQueue()

    class Tell(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            found.put(model.schedule(self.value))

    status: list[Any] = []
    thread = threading.Thread(
        target=lambda: status.append(solver.solve(model.cp, Tell())), daemon=True
    )
    ended = interrupted = False
    thread.start()
    while thread.is_alive() or not found.empty():
        try:
            thread.join(0.05)
            while not found.empty():
                if hear(found.get()) and not ended:
                    ended = True
                    solver.stop_search()
        except KeyboardInterrupt:
            interrupted = True
            solver.stop_search()
    proven = bool(status) and status[0] in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    bound = 0
    if status and status[0] in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        bound = max(0, math.ceil(solver.best_objective_bound - 1e-6))
    return _Outcome(proven, ended, interrupted, bound)
