"""Problem + budget -> the schedule to run: given, kept from an earlier run, or solved."""

import dataclasses
import logging

from rekindle.core import Problem, Schedule, Solution, Status, check_schedule, keep_all, simulate
from rekindle.errors import BudgetInfeasible
from rekindle.plans.options import Options
from rekindle.predict import Predictor
from rekindle.solve.constraints import (
    check_constraints,
    constrained_min_budget,
    resolve,
    run_constrained,
)
from rekindle.solve.registry import find_solver
from rekindle.solve.solution_cache import SolveRequest, lookup, store

log = logging.getLogger("rekindle")


def choose(options: Options, predictor: Predictor, budget: int | None) -> tuple[Solution, bool]:
    """A solution with a schedule, and whether it was kept from an earlier run; raises
    BudgetInfeasible, with the smallest peak found, where there is none.

    The first Ctrl-C ends the search: its best schedule so far is the answer, and KeyboardInterrupt
    is raised where there is none. No signal handler is set: solvers catch KeyboardInterrupt (see
    `Solver.solve`), so outside of them, and the second time, it is raised as ever."""
    problem = predictor.problem
    if options.schedule is not None:
        return _given(options, problem, budget), False
    if budget is None:
        raise TypeError("give a budget (bytes, '8GiB', or a fraction such as 0.5) or a schedule")
    solution, kept = _solve_as_allocated(options, predictor, budget)
    if solution.stopped_by == "interrupt":
        _say_interrupted(problem, solution)
    if solution.schedule is None:
        smallest = solution.smallest or constrained_min_budget(problem, options.wishes)
        peak = simulate(problem, smallest).peak
        raise BudgetInfeasible(
            f"no plan within {budget:,} bytes: {solution.message or solution.status.value}; the "
            f"smallest peak found is {peak:,} bytes",
            peak,
        )
    return solution, kept


def _say_interrupted(problem: Problem, solution: Solution) -> None:
    if solution.schedule is None:
        raise KeyboardInterrupt("interrupted before a schedule within the budget was found")
    before, cost = (simulate(problem, s).cost for s in (keep_all(problem), solution.schedule))
    overhead = cost / before - 1 if before else 0.0
    log.warning("interrupted; best so far %+.1f %%, press again to stop", 100 * overhead)


def _given(options: Options, problem: Problem, budget: int | None) -> Solution:
    given = options.schedule
    assert given is not None
    schedule = given if isinstance(given, Schedule) else given(problem)
    check_schedule(problem, schedule)
    if options.wishes:
        check_constraints(problem, resolve(problem, options.wishes), schedule)
    if budget is not None and (peak := simulate(problem, schedule).peak) > budget:
        raise BudgetInfeasible(
            f"the given schedule has a peak of {peak:,} bytes; the budget is {budget:,}", peak
        )
    return Solution(status=Status.FEASIBLE, schedule=schedule, solver="given")


def _solve_as_allocated(
    options: Options, predictor: Predictor, budget: int
) -> tuple[Solution, bool]:
    """A schedule within the budget as the device's allocator will count it: where blocks turn out
    larger than their requests, the excess is taken off the solver's budget. Each further try begins
    with the schedule of the one before and has half its time: all of them together take less than
    twice the limit."""
    problem = predictor.problem
    whole, simulated = predictor.keep_all_bytes, simulate(problem, keep_all(problem))
    if whole <= budget or not simulated.peak:
        target = budget
    else:
        target = budget * simulated.peak // whole
    found: Schedule | None = None
    for num_before in range(4):
        limit_s = options.time_limit_s / 2**num_before
        once = dataclasses.replace(options, time_limit_s=limit_s)
        solution, kept = _solve(once, problem, target, found)
        if solution.schedule is None:
            return solution, kept
        excess = predictor.peak_bytes(solution.schedule) - budget
        if excess <= 0:
            return solution, kept
        if solution.stopped_by == "interrupt":  # the user waits no longer
            break
        target -= excess + budget // 500
        found = solution.schedule
    return dataclasses.replace(
        solution, schedule=None, smallest=solution.schedule, status=Status.INFEASIBLE
    ), False


def _solve(
    options: Options, problem: Problem, budget: int, warm_start: Schedule | None
) -> tuple[Solution, bool]:
    solver = find_solver(options.solver)
    constraints = (options.wishes.save, options.wishes.recompute)
    request = SolveRequest(problem, budget, solver, options.seed, constraints)
    if options.cache and (known := lookup(request, options.time_limit_s)) is not None:
        return known, True
    solution = run_constrained(
        solver,
        problem,
        budget,
        options.wishes,
        time_limit_s=options.time_limit_s,
        seed=options.seed,
        warm_start=warm_start,
    )
    if options.cache:
        store(request, solution, options.time_limit_s)
    return solution, False
