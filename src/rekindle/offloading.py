"""Recomputation and moves to host memory, decided together: Problem with a link -> Choice.

Recomputation alone is planned first, as without a link. Then `solve.transfers` searches from there
for a schedule that moves values too. The two are compared by their predicted time, which knows what
the schedule's own time does not: kernels run slower beside transfers. So the answer is never
predicted to be slower than recomputation alone, and moves nothing where that gains next to nothing.
"""

import logging
from dataclasses import replace

from rekindle.core import Problem, Schedule, Solution, Status, host_layout, keep_all, simulate
from rekindle.errors import BudgetInfeasible
from rekindle.plans.options import Options
from rekindle.predict import Predictor
from rekindle.solve.deadline import TimeLeft
from rekindle.solve.progress import milestone
from rekindle.solve.registry import find_solver, with_gap
from rekindle.solve.small_schedules import known_schedules
from rekindle.solve.solution_cache import SolveRequest, lookup, store
from rekindle.solve.transfers import with_transfers
from rekindle.solving import Choice, choose

LEAST_GAIN = 0.01  # of recomputation's time: less is not worth host memory
SHARE_ALONE = 0.6  # of the time limit, for recomputation alone
NUM_TRIES = 3  # where the allocator needs more than the solver counted, or host memory has gaps

log = logging.getLogger("rekindle")


def choose_moving(
    options: Options, predictor: Predictor, budget: int | None, start: Schedule | None = None
) -> Choice:
    """Like `choose`, for a problem with a link: the schedule may move values. The search begins
    where `start` is, its ops alone."""
    if options.schedule is not None:
        return choose(options, predictor, budget)
    if start is not None:
        start = Schedule(start.ops)
    plain = replace(predictor, problem=replace(predictor.problem, transfers=None))
    if options.wishes:
        log.warning("values are not moved to the host: save= and recompute= are about ops alone")
        return choose(options, plain, budget, start)
    left = TimeLeft(options.time_limit_s)
    shorter = replace(options, time_limit_s=SHARE_ALONE * options.time_limit_s, best_effort=False)
    try:
        alone = choose(shorter, plain, budget, start)
    except BudgetInfeasible:
        assert budget is not None
        moving = _Moving(options, predictor, budget).from_smallest(left())
        if moving is not None:
            return moving
        if not options.best_effort:
            raise
        return choose(replace(options, time_limit_s=max(1.0, left())), plain, budget, start)
    target = alone.budget_bytes if budget is None or alone.budget_bytes is None else budget
    if target is None or _costs_nothing(plain.problem, alone.solution):
        return alone
    moving = _Moving(options, predictor, target).beside(alone, left())
    return alone if moving is None else moving


def problem_of(predictor: Predictor, choice: Choice) -> Problem:
    """The problem that a plan records: without the link where nothing is moved."""
    if choice.solution.schedule is not None and choice.solution.schedule.transfers:
        return predictor.problem
    return replace(predictor.problem, transfers=None)


def _costs_nothing(problem: Problem, solution: Solution) -> bool:
    assert solution.schedule is not None
    base = simulate(problem, keep_all(problem)).cost
    return simulate(problem, solution.schedule).cost <= base


class _Moving:
    """One search, for a budget as the device's allocator counts it."""

    def __init__(self, options: Options, predictor: Predictor, budget: int) -> None:
        self.options, self.predictor, self.budget = options, predictor, budget
        self.problem = predictor.problem
        solver = find_solver(options.solver)
        self.solver = with_gap(solver, options.gap) if isinstance(options.solver, str) else solver

    def beside(self, alone: Choice, time_limit_s: float) -> Choice | None:
        """The better one, or None where that is recomputation alone."""
        found = self._search(alone.solution, time_limit_s)
        if found is None:
            return None
        schedules = (found.solution.schedule, alone.solution.schedule)
        moving_ns, alone_ns = (self.predictor.step_ns(s) for s in schedules if s is not None)
        return found if moving_ns <= (1 - LEAST_GAIN) * alone_ns else None

    def from_smallest(self, time_limit_s: float) -> Choice | None:
        """For a budget that recomputation alone cannot meet."""
        plain = replace(self.problem, transfers=None)
        known = known_schedules(plain, self.options.wishes, on_disk=self.options.cache)
        small = min(known, key=self.predictor.peak_bytes, default=None)
        nothing = Solution(status=Status.INFEASIBLE, schedule=None, solver="", smallest=small)
        return self._search(nothing, max(time_limit_s, 1.0))

    def _search(self, alone: Solution, time_limit_s: float) -> Choice | None:
        left = TimeLeft(time_limit_s)
        problem, link = self.problem, self.problem.transfers
        assert link is not None
        whole = self.predictor.keep_all_bytes
        simulated = simulate(problem, keep_all(problem)).peak
        target = self.budget * simulated // max(whole, 1) if whole > self.budget else self.budget
        for _ in range(NUM_TRIES):
            if target <= 0:
                return None
            solution, kept = self._solve(problem, target, alone, left())
            schedule = solution.schedule
            if schedule is None or not schedule.transfers:
                return None
            excess = self.predictor.peak_bytes(schedule) - self.budget
            beyond = self._beyond_host(schedule)
            if excess <= 0 and beyond <= 0:
                return Choice(solution, kept, self.budget)
            if left() <= 0 or solution.stopped_by == "interrupt":
                return None
            if excess > 0:
                target -= excess + self.budget // 500
            if beyond > 0:
                assert link.host_budget is not None
                link = replace(link, host_budget=max(0, link.host_budget - beyond))
                problem = replace(problem, transfers=link)
        return None

    def _beyond_host(self, schedule: Schedule) -> int:
        """By how much the one piece of host memory is larger than allowed."""
        link = self.problem.transfers
        assert link is not None
        if link.host_budget is None:
            return 0
        layout = host_layout(schedule.steps, [v.size for v in self.problem.values])
        return layout.num_bytes - link.host_budget

    def _solve(
        self, problem: Problem, target: int, alone: Solution, time_limit_s: float
    ) -> tuple[Solution, bool]:
        options = self.options
        request = SolveRequest(problem, target, self.solver, options.seed)
        if options.cache and (known := lookup(request, time_limit_s)) is not None:
            return known, True
        milestone(f"searching which values to move to the host, at most {time_limit_s:.0f} s")
        solution = with_transfers(
            self.solver,
            problem,
            target,
            alone,
            time_limit_s=time_limit_s,
            seed=options.seed,
            rank=self.predictor.step_ns,
        )
        if options.cache:
            store(request, solution, time_limit_s)
        return solution, False
