"""Problem + budget -> Solution: a given schedule, one from the cache of solutions, or a solver's.

The budget counts bytes as the device's allocator hands them out; a solver counts the sizes of the
problem. `_solve_as_allocated` translates between the two.
"""

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

NO_BUDGET = (
    "neither a budget nor a schedule was given; give budget= (bytes, '8GiB', or a fraction such as "
    "0.5), device_budget= or schedule="
)
log = logging.getLogger("rekindle")


def choose(
    options: Options, predictor: Predictor, budget: int | None, start: Schedule | None = None
) -> tuple[Solution, bool]:
    """A solution with a schedule, and whether it is from the cache. Raises BudgetInfeasible, with
    the smallest peak found, if no schedule was found. The search may begin at `start`, a schedule
    of the problem that need not be within the budget.

    The first Ctrl-C ends the search and returns its best schedule so far; without one,
    KeyboardInterrupt is raised. No signal handler is installed: solvers catch KeyboardInterrupt
    (see `Solver.solve`), so outside of a solver, and the second time, it is raised as usual."""
    problem = predictor.problem
    if options.schedule is not None:
        return _given(options, problem, budget), False
    if budget is None:
        raise TypeError(NO_BUDGET)
    solution, kept = _solve_as_allocated(options, predictor, budget, start)
    if solution.stopped_by == "interrupt":
        _say_interrupted(problem, solution)
    if solution.schedule is None:
        smallest = solution.smallest or constrained_min_budget(problem, options.wishes)
        peak = simulate(problem, smallest).peak
        raise BudgetInfeasible(
            f"infeasible within {budget:,} bytes: {solution.message or solution.status.value}; "
            f"the smallest peak found is {peak:,} bytes; give a budget of at least that",
            peak,
        )
    return solution, kept


def _say_interrupted(problem: Problem, solution: Solution) -> None:
    if solution.schedule is None:
        raise KeyboardInterrupt("interrupted before a schedule within the budget was found")
    before, cost = (simulate(problem, s).cost for s in (keep_all(problem), solution.schedule))
    overhead = cost / before - 1 if before else 0.0
    log.warning(
        "search interrupted: using the best schedule so far, overhead %+.1f %%; press Ctrl-C again "
        "to stop",
        100 * overhead,
    )


def _given(options: Options, problem: Problem, budget: int | None) -> Solution:
    given = options.schedule
    assert given is not None
    schedule = given if isinstance(given, Schedule) else given(problem)
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


def _solve_as_allocated(
    options: Options, predictor: Predictor, budget: int, found: Schedule | None
) -> tuple[Solution, bool]:
    """A schedule within the budget as the device's allocator will count it. Where its blocks are
    larger than what was requested, the solver's budget is reduced by the excess and the search runs
    again, from the schedule found before and with half its time: all searches together take less
    than twice the time limit."""
    problem = predictor.problem
    whole, simulated = predictor.keep_all_bytes, simulate(problem, keep_all(problem))
    if whole <= budget or not simulated.peak:
        target = budget
    else:  # start with what keep-all loses to the allocator; most problems need no second try
        target = budget * simulated.peak // whole
    for num_before in range(4):
        limit_s = options.time_limit_s / 2**num_before
        once = dataclasses.replace(options, time_limit_s=limit_s)
        solution, kept = _solve(once, problem, target, found)
        if solution.schedule is None:
            return solution, kept
        excess = predictor.peak_bytes(solution.schedule) - budget
        if excess <= 0:
            return solution, kept
        if solution.stopped_by == "interrupt":  # the user does not want to wait
            break
        target -= excess + budget // 500  # 0.2 % more, or small excesses would cost a try each
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
