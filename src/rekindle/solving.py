"""Problem + budget -> Solution: a given schedule, one from the cache of solutions, or a solver's.

The budget counts bytes as the device's allocator hands them out; a solver counts the sizes of the
problem. `_Planning.within` translates between the two. Where a search finds nothing, what is known
of the problem decides (`small_schedules`): a budget is refused only if no schedule within it is
known, and the smallest peak that the refusal names is one that can be had.
"""

import dataclasses
import logging
import math
from dataclasses import dataclass

from rekindle.core import (
    MIN_BUDGET,
    Problem,
    Schedule,
    Solution,
    Status,
    check_schedule,
    is_fraction,
    keep_all,
    simulate,
)
from rekindle.errors import BudgetInfeasible
from rekindle.plans.options import Options
from rekindle.predict import Predictor
from rekindle.report import format
from rekindle.solve.base import trivial_floor
from rekindle.solve.constraints import (
    check_constraints,
    constrained_min_budget,
    resolve,
    run_constrained,
)
from rekindle.solve.deadline import TimeLeft
from rekindle.solve.progress import milestone
from rekindle.solve.registry import find_solver, with_gap
from rekindle.solve.small_schedules import known_schedules, remember
from rekindle.solve.solution_cache import SolveRequest, lookup, store

NO_BUDGET = (
    "neither a budget nor a schedule was given; give budget= (bytes, '8GiB', or a fraction such as "
    "0.5), device_budget= or schedule="
)
# Of the time limit, for a search and for those that follow where the allocator needs more than the
# solver counted. What a search leaves goes to the smallest peak, where that is asked for.
SHARES = (0.75, 0.125, 0.0625, 0.0625)
SMALLEST_S = 5.0  # at most, for the smallest peak of a budget that cannot be met
log = logging.getLogger("rekindle")


@dataclass(frozen=True, slots=True)
class Choice:
    """The schedule that a plan gets."""

    solution: Solution  # with a schedule
    kept: bool  # it is from the cache of solutions
    budget_bytes: int | None  # that it keeps: the one given, or the smallest that was found


def choose(
    options: Options, predictor: Predictor, budget: int | None, start: Schedule | None = None
) -> Choice:
    """A solution with a schedule. Raises BudgetInfeasible, with the smallest peak found, if no
    schedule was found; with `best_effort`, that smallest peak is the budget instead. The search
    may begin at `start`, a schedule of the problem that need not be within the budget.

    The first Ctrl-C ends the search and returns its best schedule so far; without one,
    KeyboardInterrupt is raised. No signal handler is installed: solvers catch KeyboardInterrupt
    (see `Solver.solve`), so outside of a solver, and the second time, it is raised as usual."""
    problem = predictor.problem
    if options.schedule is not None:
        return Choice(_given(options, problem, budget), False, budget)
    planning = _Planning(options, predictor)
    if options.budget == MIN_BUDGET:
        limit_s = 0.5 * options.time_limit_s
        smallest = planning.smallest(None, min(2 * SMALLEST_S, limit_s))
        return planning.at_smallest(smallest)
    if budget is None:
        raise TypeError(NO_BUDGET)
    solution, kept = planning.within(budget, start)
    if solution.stopped_by == "interrupt":
        _say_interrupted(problem, solution)
    if solution.schedule is not None:
        remember(problem, options.wishes, solution.schedule)
        return Choice(solution, kept, budget)
    smallest = planning.smallest(solution.smallest, SMALLEST_S)
    peak = predictor.needed_bytes(smallest)
    if peak <= budget:  # the search was unlucky, or had too little time
        return dataclasses.replace(planning.at_smallest(smallest, budget), budget_bytes=budget)
    why = _why_infeasible(options, predictor, budget, solution)
    found = _smallest_found(problem, peak, predictor.keep_all_bytes)
    if options.best_effort:
        log.warning("%s; best effort: %s", why, found)
        return planning.at_smallest(smallest)
    raise BudgetInfeasible(f"{why}; {found}. {_WHAT_TO_TRY}", peak)


_WHAT_TO_TRY = 'Give at least that, budget="min", or best_effort=True to take it'


class _Planning:
    """One choice of a schedule, on one clock."""

    def __init__(self, options: Options, predictor: Predictor) -> None:
        self.options = options
        self.predictor = predictor
        self.problem = predictor.problem
        self.left = TimeLeft(options.time_limit_s)

    def within(self, budget: int, found: Schedule | None) -> tuple[Solution, bool]:
        """A schedule within the budget as the device's allocator will count it. Where its blocks
        are larger than what was requested, the solver's budget is reduced by the excess and the
        search runs again, from the schedule found before."""
        whole = self.predictor.keep_all_bytes
        simulated = simulate(self.problem, keep_all(self.problem)).peak
        if whole <= budget or not simulated:
            target = budget
        else:  # start with what keep-all loses to the allocator; most problems need no second try
            target = budget * simulated // whole
        for share in SHARES:
            solution, kept = self.solve(target, found, share)
            if solution.schedule is None:
                # What is proven of the solver's budget is not of a larger one.
                message = solution.message if target == budget else ""
                return dataclasses.replace(solution, message=message), kept
            excess = self.predictor.needed_bytes(solution.schedule) - budget
            if excess <= 0:
                return solution, kept
            if solution.stopped_by == "interrupt":  # the user does not want to wait
                break
            # 0.2 % more, or small excesses would cost a try each
            target -= excess + budget // 500
            found = solution.schedule
        return dataclasses.replace(
            solution, schedule=None, smallest=solution.schedule, status=Status.TIME_LIMIT
        ), False

    def smallest(self, also: Schedule | None, limit_s: float) -> Schedule:
        """The schedule with the smallest peak that is known or found: the one given is among
        them."""
        options = self.options
        milestone("searching for the smallest peak")
        found = [
            constrained_min_budget(
                self.problem,
                options.wishes,
                min(limit_s, max(self.left(), SHARES[-1] * options.time_limit_s)),
            ),
            *known_schedules(self.problem, options.wishes, on_disk=options.cache),
        ]
        if also is not None:
            found.append(also)
        best = min(found, key=self._peak_and_cost)
        remember(self.problem, options.wishes, best, on_disk=options.cache)
        return best

    def at_smallest(self, smallest: Schedule, budget: int | None = None) -> Choice:
        """A schedule that needs no more than that one, or than the budget, and costs as little as
        the time left allows."""
        peak = self.predictor.needed_bytes(smallest)
        trace = simulate(self.problem, smallest)
        target = trace.peak if budget is None else trace.peak + budget - peak
        solution, kept = self.solve(target, smallest, max(SHARES[-1], self._share_left))
        if solution.schedule is not None:
            needs, cost = self._peak_and_cost(solution.schedule)
            if needs <= (peak if budget is None else budget) and cost <= trace.cost:
                remember(self.problem, self.options.wishes, solution.schedule)
                return Choice(solution, kept, peak)
        own = Solution(status=Status.FEASIBLE, schedule=smallest, solver="smallest peak")
        return Choice(own, False, peak)

    @property
    def _share_left(self) -> float:
        """Of the time limit; in eighths, since the cache compares the times of searches."""
        return math.floor(8 * self.left() / self.options.time_limit_s) / 8

    def _peak_and_cost(self, schedule: Schedule) -> tuple[int, int]:
        return self.predictor.needed_bytes(schedule), simulate(self.problem, schedule).cost

    def solve(
        self, budget: int, warm_start: Schedule | None, share: float
    ) -> tuple[Solution, bool]:
        """One search, with a share of the time limit; or the one from the cache."""
        options = self.options
        solver = find_solver(options.solver)
        if isinstance(options.solver, str):
            solver = with_gap(solver, options.gap)
        limit_s = share * options.time_limit_s
        constraints = (options.wishes.save, options.wishes.recompute)
        request = SolveRequest(self.problem, budget, solver, options.seed, constraints)
        if options.cache and (known := lookup(request, limit_s)) is not None:
            return known, True
        whole, wanted = (
            format.size(self.problem, n) for n in (self.predictor.keep_all_bytes, budget)
        )
        milestone(f"searching within {wanted} (keep-all {whole}), at most {limit_s:.0f} s")
        solution = run_constrained(
            solver,
            self.problem,
            budget,
            options.wishes,
            time_limit_s=limit_s,
            seed=options.seed,
            warm_start=warm_start,
        )
        if options.cache:
            store(request, solution, limit_s)
        return solution, False


# ---- sentences


def _why_infeasible(options: Options, predictor: Predictor, budget: int, solution: Solution) -> str:
    problem = predictor.problem

    def size(amount: int) -> str:
        return format.size(problem, amount)

    asked = size(budget)
    if options.device_budget is not None:
        asked = f"{asked}, what device_budget={options.device_budget!r} leaves for a step,"
    elif not options.count_gradients:
        asked = f"{options.budget} and the parameters' gradients, {asked} in all,"
    elif is_fraction(options.budget):
        asked = f"{options.budget} of {size(predictor.keep_all_bytes)} = {asked}"
    resident = set(problem.resident)
    last = sum(problem.values[v].size for v in problem.outputs if v not in resident)
    if last > budget:
        why = f"{predictor.outputs_are} alone are {size(last)}"
    elif (floor := trivial_floor(problem)) > budget:
        why = (
            "the largest op with its inputs and outputs, or what must be there at the end, needs "
            f"{size(floor)}"
        )
    elif "proven:" in solution.message:
        why = "it is proven that no schedule does"
    else:
        why = "no schedule within it was found, which is no proof"
    if options.wishes:
        why += f", with {options.wishes}"
    return f"{asked} cannot be met: {why}"


def _smallest_found(problem: Problem, peak: int, keep_all_peak: int) -> str:
    # Rounded up: a budget of what is printed here can be met.
    share = f"{math.ceil(100 * peak / keep_all_peak) / 100:.2f}; " if keep_all_peak else ""
    return f"smallest found {format.size_rounded_up(problem, peak)} ({share}{peak:,} bytes)"


def _say_interrupted(problem: Problem, solution: Solution) -> None:
    if solution.schedule is None:
        raise KeyboardInterrupt("interrupted before a schedule within the budget was found")
    before, cost = (simulate(problem, s).cost for s in (keep_all(problem), solution.schedule))
    overhead = format.signed_percent(format.overhead(cost, before))
    log.warning("interrupted; best so far %s, press Ctrl-C again to stop", overhead)


def _given(options: Options, problem: Problem, budget: int | None) -> Solution:
    given = options.schedule
    assert given is not None
    schedule = given if isinstance(given, Schedule) else given(problem)
    # From outside: it may be of another problem, or hold any numbers.
    check_schedule(problem, schedule)
    if options.wishes:
        check_constraints(problem, resolve(problem, options.wishes), schedule)
    if budget is not None and (peak := simulate(problem, schedule).peak) > budget:
        raise BudgetInfeasible(
            f"the given schedule has a peak of {peak:,} bytes and the budget is {budget:,}; give a "
            "larger budget or another schedule",
            peak,
        )
    return Solution(status=Status.FEASIBLE, schedule=schedule, solver="given")
