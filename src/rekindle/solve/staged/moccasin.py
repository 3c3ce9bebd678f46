"""`moccasin`: retention intervals in constraint programming (Bartan et al. 2023), with CP-SAT.

Each op v may run up to C_v times (2 by default); each run gives each of its outputs an interval
[s, e): made at step s, kept up to step e - 1. Numbers in brackets are the paper's equations.

- a[c]: run c takes place; the first one always does (7).                `RetentionModel._add_runs`
- s[c]: its step. With the order kept (Sec. 2.3) the steps are those of the staged space
  (`staged_space`): the first run of op t ends stage t, and a later run of op i stands at place i of
  some stage. Without it, any step up to the number of runs, all different (6).
- e[v, c] <= s[c + 1] (3): the next copy takes over.                               `_add_copies`
- Every run finds its inputs (5): for each input some copy with s_u + 1 <= s_v <= e_u - 1.
  As the paper's reservoir (10) on half-open intervals, or, by default, with one literal per copy
  that may be read, which propagates better.                      `_read_a_copy`, `_add_reservoir`
  Where the op may overwrite the input, s_v <= e_u is enough: the simulator's saving.
- An output's last copy, and the copy of a held value that the loss reads, live to the end.
                                                                                  `_add_lasting`
- Memory (4): the intervals' sizes and the workspace of the runs are cumulative.   `_add_memory`
- Objective (1): the cost of the runs.                                            `minimize_cost`

Phase 1 (Sec. 2.4; `minimize_peak`) minimizes max(peak, budget) from keep-all; phase 2 minimizes
the cost from there. With the order kept, a schedule that is known bounds the extra cost, and that
bounds which runs can be part of a cheaper one: phase 2 starts again with fewer runs when that
halves the model (`staged_space`).

Ours, not the paper's, for graphs of more than a hundred ops, in any order of more than 24
(`seeded=False` leaves out the first):
- Phase 1 begins with fast heuristics along the listed order (`start_schedules`) and, where they
  find nothing, takes the schedule of `auto`; the order of its first runs is the input order then.
- Before phase 2 on the whole, phase 2 on one neighbourhood of the best schedule after another: the
  runs again of some dozen ops are free, all else stays (`neighbourhood`, `free_ops`). C_v is what
  the schedule has, where that is more. A whole model of too many runs gets no time of its own.
- The bound of `auto`, which holds for every order, holds here too.

One worker is repeatable and the fastest up to about a hundred ops; beyond, the portfolio finds
schedules where one worker finds none. CP-SAT runs in a process of its own (`cpsat`).

The space: at most C_v runs of op v; with the order kept, in stages. "Optimal" and the bound hold
for that space. Sizes and costs beyond 2^40 units are rounded to the safe side, and nothing is
proven where that loses anything.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from rekindle.core import Problem, Schedule, Solution, Status, keep_all, simulate
from rekindle.solve.backends.cpsat import Job, Outcome, WorkerFailed, solve_retention
from rekindle.solve.base import trivial_floor
from rekindle.solve.deadline import TimeLeft
from rekindle.solve.lower_bound import best_bound
from rekindle.solve.progress import Progress, report
from rekindle.solve.staged.checkmate import StagedResult, staged_solution
from rekindle.solve.staged.free_ops import choose_free
from rekindle.solve.staged.neighbourhood import Neighbourhood, neighbourhood
from rekindle.solve.staged.retention_model import Precedence
from rekindle.solve.staged.staged_space import UNCAPPED, Stages, staged_like
from rekindle.solve.staged.start_schedules import auto_start, listed_starts

_SMALL = 128  # ops: one worker is enough, and the whole model can be proven
_FEW = 24  # the same in any order
AUTO_SHARE = 0.3  # of the time left, where no schedule in the listed order is found
FREE_OPS = (12, 120)  # of a neighbourhood
PART_S = 5.0  # for a neighbourhood, at most
MOST_RUNS = 20_000  # of the whole model, beyond which it gets no time


@dataclass(frozen=True, slots=True)
class Moccasin:
    """Retention intervals, solved by CP-SAT."""

    max_runs: int = 2  # C: how often an op may run
    keep_order: bool = True
    precedence: Precedence = "copies"
    workers: int = 0  # of CP-SAT; 0: one for a small problem, else its portfolio of eight
    repeatable: bool = False  # the portfolio takes turns: the same seed, the same search, slower
    phase_1_share: float = 0.1  # of the time limit
    seeded: bool = True  # phase 1 begins with fast heuristics

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
        try:
            result = search.run(warm_start)
        except WorkerFailed as error:
            return Solution(Status.ERROR, None, self.name, message=str(error))
        order = "that keep the listed order, in stages" if self.keep_order else "in any order"
        space = f"schedules {order}, with at most {self.max_runs} runs of an op"
        solution = staged_solution(problem, budget, result, self.name, warm_start, space)
        if search.other_order:
            note = (
                "the input order is that of a schedule of auto; none in the listed order was found"
            )
            solution = replace(solution, notes=(*solution.notes, note))
        return solution


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
    other_order: bool = field(init=False, default=False)  # the best is in an order of `auto`

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
            self._offer_inside(inside)
        infeasible = False
        try:
            if self.best is None and self.options.seeded:
                self._seed()
            if self.best is None:
                infeasible = self._phase_1()
            if self._large and self.best is not None:
                self._prove_bound()
                self._improve()
                if self.time_left() <= 0:
                    self.stopped_by = self.stopped_by or "time limit"
            while not infeasible and self.least_extra < self.best_extra and not self.stopped_by:
                infeasible = self._phase_2()
        except KeyboardInterrupt:
            self.stopped_by = "interrupt"
        return StagedResult.of_extras(
            self.total, self.best, self.best_extra, self.least_extra, infeasible, self.stopped_by
        )

    def _offer_inside(self, schedule: Schedule) -> None:
        # A schedule outside the space is no incumbent of the model: its cost would cut off what
        # the model can find, and "nothing better" would be taken for a proof. Where the whole model
        # is too large to be proven anyway, any schedule will do.
        few = max(simulate(self.problem, schedule).runs) <= self.options.max_runs
        if few or len(self.problem.ops) > _SMALL:
            self.offer(schedule)

    def _seed(self) -> None:
        """Phase 1 by fast heuristics: in the listed order or, where they find nothing there and
        the problem is large, the schedule of `auto`, whose order is the input order then."""
        if self.options.keep_order:
            share = self.options.phase_1_share * self.time_left()
            for schedule in listed_starts(self.problem, self.budget, share, self.seed):
                self._offer_inside(schedule)
        if self.best is None and self._large:
            share = AUTO_SHARE * self.time_left()
            found = auto_start(self.problem, self.budget, share, self.seed)
            if found is not None:
                self.offer(found)  # C_v is what it has, where that is more
                self.other_order = self.options.keep_order

    @property
    def _large(self) -> bool:
        """The model of the whole is not enough by itself."""
        return len(self.problem.ops) > (_SMALL if self.options.keep_order else _FEW)

    def _prove_bound(self) -> None:
        """The bound that holds for every order holds for this space."""
        extra, infeasible = best_bound(self.problem, self.budget, min(2.0, 0.1 * self.time_left()))
        assert not infeasible
        self.least_extra = max(self.least_extra, min(extra, self.best_extra))

    def _improve(self) -> None:
        """Neighbourhoods of the best schedule, one after another: what the model of one says is
        proven, so those that take long become smaller and the others larger."""
        rng = random.Random(self.seed)
        size = float(FREE_OPS[0])
        whole = not self.other_order and self._size(self.best_extra) <= MOST_RUNS
        until = 0.5 * self.time_left() if whole else 0.0
        while self.least_extra < self.best_extra and not self.stopped_by:
            left = self.time_left() - until
            if left <= 0:
                return
            assert self.best is not None
            free = choose_free(self.problem, self.best.ops, int(size), rng)
            part = neighbourhood(self.problem, self.best, free, self.budget)
            inside = None if part is None else staged_like(part.problem, part.start)
            if part is None or inside is None:
                continue
            trace = simulate(part.problem, inside)
            extra = trace.cost - sum(op.cost for op in part.problem.ops)
            if trace.peak > self.budget or extra <= 0:
                continue
            solved = self._solve_part(part, inside, extra, min(left, PART_S))
            size = max(FREE_OPS[0], min(FREE_OPS[1], size * (1.1 if solved else 0.8)))

    def _solve_part(
        self, part: Neighbourhood, start: Schedule, extra: int, time_limit_s: float
    ) -> bool:
        """True if the neighbourhood's optimum was proven."""
        job = self._job(2, extra, start, part.problem)
        job = replace(job, workers=1)
        return self._solve(job, time_limit_s, lambda: False, part.schedule).proven

    def _phase_1(self) -> bool:
        """Finds a schedule within the budget; True if it is proven that there is none."""
        # No cap yet: without a schedule nothing bounds what the runs may cost.
        job = self._job(1, UNCAPPED, keep_all(self.problem))
        time_limit_s = self.options.phase_1_share * self.time_left()
        outcome = self._solve(job, time_limit_s, lambda: self.best is not None)
        return self.best is None and outcome.proven

    def _phase_2(self) -> bool:
        """Improves the best schedule, or finds one, until it is proven, the time is up, or the
        model that is enough for what is cheaper has become much smaller; True if it is proven
        that there is none."""
        start = self.best
        if self._workers() > 1 and 20 * self.best_extra > self.total:
            start = None  # from a dear one the portfolio's neighbourhoods take long to come down
        # Only what is cheaper than the best so far is looked for, so the runs that may be part of
        # it become fewer with every improvement; from half of them on it pays to build the model
        # again.
        size = self._size(self.best_extra)
        outcome = self._solve(
            self._job(2, self.best_extra, start),
            self.time_left(),
            lambda: 2 * self._size(self.best_extra) < size,
        )
        self.least_extra = max(self.least_extra, min(outcome.bound, self.best_extra))
        # Proven over what the model has: all runs within the cap that the best schedule gives.
        if outcome.proven:
            self.least_extra = self.best_extra
            return self.best is None
        if not outcome.ended and not self.stopped_by:
            self.stopped_by = "time limit"
        return False

    def _workers(self) -> int:
        # One worker searches in a fixed order, so that equal seeds give equal schedules.
        return self.options.workers or (1 if len(self.problem.ops) <= _SMALL else 8)

    def _size(self, cap: int) -> int:
        """The number of runs that the model has to consider."""
        if not self.options.keep_order:
            return 1
        return int(Stages.of(self.problem, self.budget, cap=cap).runs.sum())

    def _job(
        self, phase: Literal[1, 2], cap: int, start: Schedule | None, part: Problem | None = None
    ) -> Job:
        options, problem = self.options, part or self.problem
        most = [options.max_runs] * len(problem.ops)
        # A part keeps the runs of the schedule that it begins from.
        for i, count in enumerate(simulate(problem, start).runs if part and start else ()):
            most[i] = max(most[i], count)
        return Job(
            problem=problem,
            budget=self.budget,
            # The cap leaves out runs of stages; without stages there are none to leave out.
            cap=cap if options.keep_order or part is not None else UNCAPPED,
            phase=phase,
            hint=start.ops if start is not None else None,
            max_runs=tuple(most),
            keep_order=options.keep_order or part is not None,
            precedence=options.precedence,
            workers=self._workers(),
            repeatable=options.repeatable,
            seed=self.seed,
        )

    def _solve(
        self,
        job: Job,
        time_limit_s: float,
        enough: Callable[[], bool],
        whole: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    ) -> Outcome:
        def hear(schedule: Schedule) -> bool:
            before = self.best_extra
            self.offer(whole(schedule))
            return self.best_extra < before and enough()

        outcome = solve_retention(job, time_limit_s, hear)
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
