"""`checkmate`: the cheapest staged schedule, by mixed-integer programming (Jain et al. 2020).

The formulation is in `staged_milp` (rk-Checkmate, App. B of Rockmate), the space in `staged_space`:
schedules that keep the listed order. "Optimal" and the bound are proven over that space; a schedule
that reorders may be cheaper. `cheapest_staged` is the method for any (sub-)problem with a budget
for the peak (M_peak) and, optionally, for what is saved across the loss (M_save).

How it is solved. The extra cost of a good schedule is small, and with a cap on it most runs fall
away before anything is solved. So the cap is raised from small to large until a schedule within
it exists (`_Search.level`):
1. The relaxation under the cap, memory rows added as they are violated (`StagedModel.relax`).
   Infeasible, or dearer than the cap: no schedule is within the cap.
2. Two-phase rounding of it (Checkmate, Sec. 5; FastSA D.2) for a first schedule (`round_kept`).
3. Runs whose reduced cost alone takes the relaxation above the cap are left out
   (`_Search._worthwhile`).
4. The rest is solved as a MIP. Its optimum, if within the cap, is the optimum of the space.
A warm start bounds the cap from above: only what is cheaper is searched for. Beyond some ten ops
one is found by fast heuristics (`start_schedules`, ours), and the bound that holds for every order
(`lower_bound`, ours) says below which cap nothing can be.

Known limits. The number of runs grows with (number of ops)^2, so tight budgets on graphs of more
than a few hundred ops end at the time limit. Optimality is HiGHS's: to about 1e-6 of the mean cost
of an op.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from rekindle.core import Problem, Schedule, Solution, Status, keep_all, simulate
from rekindle.solve.backends.mip import Backend, MIPResult, Outcome, solve_mip
from rekindle.solve.base import best_solution, trivial_floor
from rekindle.solve.deadline import OutOfTime, TimeLeft
from rekindle.solve.lower_bound import best_bound
from rekindle.solve.progress import Progress, report
from rekindle.solve.staged.staged_milp import StagedModel
from rekindle.solve.staged.staged_space import (
    UNCAPPED,
    Bools,
    Floats,
    Stages,
    runs_for_kept,
    staged_like,
)
from rekindle.solve.staged.start_schedules import listed_starts

SPACE = "schedules that keep the listed order, in stages"
_TOLERANCE = 1e-6  # of the scaled objective: what HiGHS takes for zero
FEW = 64  # ops: their models are solved in less time than a first schedule takes
_MARGIN = 4e-6  # of the budget: above what HiGHS lets a row be violated by
# 0.5 first, since what comes early is offered first; the ends find the leanest and the dearest.
_THRESHOLDS = (0.5, 0.9, 0.7, 0.3, 0.1, 0.99, 0.01)


@dataclass(frozen=True, slots=True)
class StagedResult:
    """What `cheapest_staged` found: `bound` and `infeasible` are proven over the staged space."""

    schedule: Schedule | None  # within both budgets
    bound: int  # no staged schedule within the budgets costs less
    optimal: bool
    infeasible: bool
    stopped_by: str  # "proof", "time limit" or "interrupt"

    @classmethod
    def of_extras(
        cls,
        total: int,
        best: Schedule | None,
        best_extra: int,
        least_extra: int,
        infeasible: bool,
        stopped_by: str,
    ) -> "StagedResult":
        """Of a search over the cost beyond `total`: of the best schedule, and the least proven.
        It ended by itself unless `stopped_by` says otherwise: by a proof, or for want of time."""
        optimal = best is not None and least_extra >= best_extra
        bound = total + min(least_extra, best_extra)
        proven = optimal or infeasible
        stopped_by = stopped_by or ("proof" if proven else "time limit")
        return cls(best, bound, optimal, infeasible, stopped_by)


@dataclass(frozen=True, slots=True)
class Checkmate:
    """The MILP over Checkmate stages."""

    backend: Backend = "auto"
    threads: int = 0  # 0: the library's choice
    seeded: bool = True  # a first schedule by fast heuristics, and a first bound

    name: ClassVar[str] = "checkmate"
    requires: ClassVar[tuple[str, ...]] = ("highspy",)
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
        time_left = TimeLeft(time_limit_s)
        least_extra = 0
        if self.seeded and len(problem.ops) > FEW:
            try:
                start, least_extra = _first(problem, budget, time_left, seed, warm_start)
            except KeyboardInterrupt:
                result = StagedResult(None, 0, False, False, "interrupt")
                return staged_solution(problem, budget, result, self.name, warm_start)
        else:
            start = warm_start
        result = cheapest_staged(
            problem,
            budget,
            time_limit_s=time_left(),
            seed=seed,
            warm_start=start,
            backend=self.backend,
            threads=self.threads,
            solver=self.name,
            least_extra=least_extra,
        )
        return staged_solution(problem, budget, result, self.name, warm_start)


def _first(
    problem: Problem, budget: int, time_left: TimeLeft, seed: int, warm_start: Schedule | None
) -> tuple[Schedule | None, int]:
    """A schedule to begin with, the cheapest of the space if there is one, and the least extra cost
    that is proven for every order."""
    if simulate(problem, keep_all(problem)).peak <= budget or budget < trivial_floor(problem):
        return warm_start, 0
    extra, infeasible = best_bound(problem, budget, min(2.0, 0.05 * time_left()))
    start = warm_start
    least: int | None = None
    if warm_start is not None and (inside := staged_like(problem, warm_start)) is not None:
        trace = simulate(problem, inside)
        least = trace.cost if trace.peak <= budget else None
    for found in listed_starts(problem, budget, 0.1 * time_left(), seed):
        cost = simulate(problem, found).cost
        if least is None or cost < least:
            start, least = found, cost
    return start, 0 if infeasible else extra


def staged_solution(
    problem: Problem,
    budget: int,
    result: StagedResult,
    solver: str,
    warm_start: Schedule | None = None,
    space: str = SPACE,
) -> Solution:
    """The Solution for a staged result. A warm start from outside the space may be cheaper than
    what is optimal in it; then it is the answer, and nothing is proven about it."""
    candidates: list[Sequence[int]] = [keep_all(problem).ops]
    if result.schedule is not None:
        candidates.append(result.schedule.ops)
    if warm_start is not None:
        candidates.append(warm_start.ops)
    solution = best_solution(
        problem,
        budget,
        candidates,
        solver=solver,
        stopped_by=result.stopped_by,
        notes=(f"optimality and bound: over {space}",),
        proven_infeasible=result.infeasible,
        space=space,
    )
    if solution.schedule is None:
        return solution
    cost = simulate(problem, solution.schedule).cost
    if cost < result.bound:
        return solution
    if result.optimal:
        message = f"proven optimal over {space}"
        return replace(solution, status=Status.OPTIMAL, bound=cost, message=message)
    return replace(solution, status=Status.FEASIBLE, bound=result.bound)


def cheapest_staged(
    problem: Problem,
    budget: int,
    *,
    time_limit_s: float,
    save_budget: int | None = None,
    seed: int = 0,
    warm_start: Schedule | None = None,
    backend: Backend = "auto",
    threads: int = 0,
    solver: str = "checkmate",
    least_extra: int = 0,
) -> StagedResult:
    """The cheapest staged schedule with a peak within `budget` (M_peak) and, while the loss op
    runs, no more than `save_budget` (M_save) kept besides the loss op's outputs. `least_extra`:
    proven before."""
    search = _Search(
        problem, budget, save_budget, seed, backend, threads, solver, TimeLeft(time_limit_s)
    )
    search.least_extra = least_extra
    return search.run(warm_start)


@dataclass(slots=True)
class _Search:
    problem: Problem
    budget: int
    save_budget: int | None
    seed: int
    backend: Backend
    threads: int
    solver: str
    time_left: TimeLeft
    total: int = field(init=False)  # cost of the first runs
    best: Schedule | None = field(init=False, default=None)
    best_extra: int = field(init=False, default=UNCAPPED)
    least_extra: int = field(init=False, default=0)  # proven
    stopped_by: str = field(init=False, default="")
    _told: float = field(init=False, default=0.0)  # the largest bound on the extra cost reported

    def __post_init__(self) -> None:
        self.total = sum(op.cost for op in self.problem.ops)

    def run(self, warm_start: Schedule | None) -> StagedResult:
        if self.budget < trivial_floor(self.problem):
            return StagedResult(None, self.total, False, True, "proof")
        # Within the space by itself: each stage runs its own op alone.
        self.offer(keep_all(self.problem))
        if warm_start is not None and (inside := staged_like(self.problem, warm_start)):
            self.offer(inside)
        infeasible = False
        try:
            infeasible = self._deepen()
        except KeyboardInterrupt:
            self.stopped_by = "interrupt"
        except OutOfTime:
            self.stopped_by = "time limit"
        return StagedResult.of_extras(
            self.total, self.best, self.best_extra, self.least_extra, infeasible, self.stopped_by
        )

    def _deepen(self) -> bool:
        """Raises the cap until the best schedule is proven; True if there is none."""
        # A thousandth of the cost of all ops: good schedules cost little more than that, and under
        # a small cap few runs are left to consider.
        cap = max(1, self.total // 1024, self.least_extra + self.least_extra // 8)
        while self.least_extra < self.best_extra:
            cap = min(cap, self.best_extra - 1)
            stages = Stages.of(self.problem, self.budget, cap=cap, save_budget=self.save_budget)
            if self.time_left() <= 0 or self.stopped_by:
                return False
            if not self.level(stages):
                return False
            if stages.complete:
                self.least_extra = self.best_extra
                return self.best is None
            # Nothing within the cap was found by a search that misses nothing, and costs are whole.
            self.least_extra = max(self.least_extra, min(cap + 1, self.best_extra))
            self.tell()
            # By half and not by doubling: the number of runs grows with the cap, and a model a
            # little too large may take longer than two smaller ones.
            cap += cap // 2 + 1
        return False

    def level(self, stages: Stages) -> bool:
        """Searches all staged schedules with an extra cost within the cap; True if it could."""
        staged = StagedModel(stages, self.time_left)
        relaxed = staged.relax()
        if relaxed.interrupted:
            self.stopped_by = "interrupt"
            return False
        # The cap is a limit on runs here, so this says that no schedule is within the cap, and
        # nothing about larger ones.
        if relaxed.outcome is Outcome.INFEASIBLE:
            return True
        if relaxed.outcome is not Outcome.OPTIMAL:
            if relaxed.outcome is Outcome.ERROR:
                self.stopped_by = "failure of the LP solver"
            return False
        assert relaxed.x is not None
        assert relaxed.reduced_costs is not None
        for schedule in round_kept(staged, relaxed.x):
            self.offer(schedule)
            self.time_left.check()
        # The relaxation is a lower bound for every schedule of these stages.
        if relaxed.objective > self._limit(stages, staged.scale):
            return True
        worthwhile = self._worthwhile(staged, relaxed.objective, relaxed.reduced_costs)
        return self._mip(StagedModel(stages.only(worthwhile), self.time_left))

    def _limit(self, stages: Stages, scale: float) -> float:
        """What a schedule worth finding costs at most, in the objective's unit."""
        if stages.complete:
            limit = math.inf if self.best is None else self.best_extra - 1
        else:
            limit = min(stages.cap, self.best_extra - 1)
        return limit / scale + _TOLERANCE

    def _worthwhile(self, staged: StagedModel, objective: float, reduced: Floats) -> Bools:
        limit = self._limit(staged.stages, staged.scale)
        columns = staged.run_column
        # Reduced-cost fixing: a run whose column is 0 in the relaxation and would raise it by its
        # reduced cost. Above the limit no schedule worth finding has the run.
        found: Bools = (columns >= 0) & (objective + reduced[columns] <= limit + _TOLERANCE)
        return found

    def _mip(self, staged: StagedModel, margin: float = 0.0) -> bool:
        limit = self._limit(staged.stages, staged.scale)

        def hear(objective: float, bound: float, x: Floats | None) -> None:
            if x is not None:
                self.offer(staged.schedule(x))
            self.tell(min(bound * staged.scale, staged.stages.cap))

        result = solve_mip(
            staged.with_all_rows(margin),
            time_limit_s=self.time_left(),
            seed=self.seed,
            threads=self.threads,
            on_progress=hear,
            # Nothing worth finding is left. An incumbent alone says nothing about that.
            enough=lambda objective, bound: bound > limit,
            backend=self.backend,
        )
        if result.interrupted:
            self.stopped_by = "interrupt"
            return False
        if result.outcome is Outcome.ERROR:
            self.stopped_by = "failure of the MIP solver"
            return False
        if result.x is not None:
            # HiGHS satisfies a row to about 1e-6 of the budget, which may be some bytes too many.
            schedule = staged.schedule(result.x)
            if not self._fits(schedule):
                return self._with_margin(staged, result, margin)
            self.offer(schedule)
        return result.outcome is not Outcome.STOPPED or result.bound > limit

    def _with_margin(self, staged: StagedModel, result: MIPResult, margin: float) -> bool:
        """The MIP's tolerance let a schedule slightly above the budget through: solve again with
        a little less. What the first solve proved still holds, if that is enough."""
        ended = not margin and self._mip(StagedModel(staged.stages, self.time_left), _MARGIN)
        if ended and result.bound >= self.best_extra / staged.scale - 2 * _TOLERANCE:
            return True
        self.stopped_by = self.stopped_by or "numerical tolerance"
        return False

    def offer(self, schedule: Schedule) -> None:
        """Keeps the schedule if it is within the budgets and the cheapest so far."""
        extra = simulate(self.problem, schedule).cost - self.total
        if extra < self.best_extra and self._fits(schedule):
            self.best, self.best_extra = schedule, extra
            self.tell()

    def _fits(self, schedule: Schedule) -> bool:
        if simulate(self.problem, schedule).peak > self.budget:
            return False
        limit = self.save_budget
        return limit is None or saved_at_loss(self.problem, schedule) <= limit

    def tell(self, bound: float = 0.0) -> None:
        """Reports the best cost and the bound; that of a level holds up to its cap."""
        self._told = max(self._told, float(self.least_extra), min(bound, self.best_extra))
        report(
            Progress(
                solver=self.solver,
                elapsed_s=self.time_left.elapsed_s,
                cost=self.total + self.best_extra if self.best is not None else None,
                bound=self.total + self._told,
            )
        )


def round_kept(
    staged: StagedModel, x: Floats, thresholds: Sequence[float] = _THRESHOLDS
) -> Iterator[Schedule]:
    """Two-phase rounding: what the relaxation keeps by more than a threshold is kept at the begin
    of a stage; the runs follow from that. The results may be above the budget."""
    kept = staged.kept_at_stages(x)
    counts = set()
    for threshold in thresholds:
        above = kept > threshold
        count = int(above.sum())
        if count in counts:  # then it is the same set: sets shrink as the threshold rises
            continue
        counts.add(count)
        sets = [set(np.flatnonzero(row).tolist()) for row in above]
        yield runs_for_kept(staged.stages.problem, sets)


def saved_at_loss(problem: Problem, schedule: Schedule) -> int:
    """What is alive while the loss op runs, without its outputs and workspace."""
    loss = problem.loss_op
    if loss is None:
        return 0
    op = problem.ops[loss]
    # Gradients that the loss makes belong to the backward, not to what is saved for it.
    made = sum(problem.values[v].size for v in op.outputs)
    return simulate(problem, schedule).memory[schedule.ops.index(loss)] - made - op.workspace
