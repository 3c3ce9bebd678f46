"""`checkmate-lp`: the relaxation of `checkmate`, rounded (Jain et al. 2020; FastSA A.1 and D.2).

1. The linear relaxation of the model in `staged_milp` under a part of the budget (0.9), since
   rounding adds memory; a larger part where that is infeasible.                        `_relaxed`
2. Two-phase rounding: what is kept at a stage's begin by more than a threshold is kept, and the
   runs follow from that. The threshold 0.5 and 100 random ones; the cheapest result within the
   whole budget is the answer.                                              `checkmate.round_kept`

As in `checkmate` the extra cost is capped, and the cap raised until something comes out: under a
cap the relaxation is small. It is not the relaxation of the whole space then, and neither needs to
be: no bound is taken from it.

Known limits: rounding may leave the budget by far or cost a multiple (FastSA, Fig. 10); on graphs
of more than a few hundred ops the relaxation alone may take the whole time.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.solve.backends.mip import LPResult, Outcome
from rekindle.solve.base import best_solution, trivial_floor
from rekindle.solve.deadline import OutOfTime, TimeLeft
from rekindle.solve.progress import Progress, report
from rekindle.solve.staged.checkmate import round_kept
from rekindle.solve.staged.staged_milp import StagedModel
from rekindle.solve.staged.staged_space import Stages


@dataclass(frozen=True, slots=True)
class CheckmateLP:
    """Its linear relaxation, rounded."""

    budget_parts: tuple[float, ...] = (0.9, 0.95, 1.0)  # tried in turn
    num_thresholds: int = 100  # random ones, besides 0.5

    name: ClassVar[str] = "checkmate-lp"
    requires: ClassVar[tuple[str, ...]] = ("highspy",)
    exact: ClassVar[bool] = False

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
        rng = random.Random(seed)
        # The paper's threshold first; random ones by the seed, as the LP itself has no seed.
        thresholds = (0.5, *(rng.random() for _ in range(self.num_thresholds)))
        found = [keep_all(problem)]
        if warm_start is not None:
            found.append(warm_start)
        stopped_by = ""
        best: int | None = None
        try:
            for staged, relaxed in self._relaxed(problem, budget, time_left):
                if relaxed.interrupted:
                    stopped_by = "interrupt"
                    break
                if relaxed.x is None:
                    continue
                for schedule in round_kept(staged, relaxed.x, thresholds):
                    found.append(schedule)
                    trace = simulate(problem, schedule)
                    if trace.peak <= budget and (best is None or trace.cost < best):
                        best = trace.cost
                        report(Progress(self.name, time_left.elapsed_s, best))
                    time_left.check()
                if best is not None:
                    break
        except KeyboardInterrupt:
            stopped_by = "interrupt"
        except OutOfTime:
            stopped_by = "time limit"
        if not stopped_by and best is None and time_left() <= 0:
            stopped_by = "time limit"
        # Every op runs at least once.
        bound = sum(op.cost for op in problem.ops)
        return best_solution(
            problem,
            budget,
            [schedule.ops for schedule in found],
            solver=self.name,
            bound=bound,
            stopped_by=stopped_by,
        )

    def _relaxed(
        self, problem: Problem, budget: int, time_left: TimeLeft
    ) -> Iterator[tuple[StagedModel, LPResult]]:
        """Relaxations in the order in which they are worth rounding."""
        total = sum(op.cost for op in problem.ops)
        floor = trivial_floor(problem)
        if budget < floor or simulate(problem, keep_all(problem)).peak <= budget:
            return
        # Rounding up adds memory, so the relaxation has to leave some; a part that is infeasible
        # for the relaxation is so for every schedule.
        for part in self.budget_parts:
            cap = max(1, total // 1024)
            while time_left() > 0:
                # Below the floor no stage could hold its own op.
                stages = Stages.of(problem, max(floor, int(part * budget)), cap=cap)
                staged = StagedModel(stages, time_left)
                relaxed = staged.relax()
                if relaxed.outcome is not Outcome.INFEASIBLE:
                    yield staged, relaxed
                if stages.complete:
                    break
                cap *= 2
