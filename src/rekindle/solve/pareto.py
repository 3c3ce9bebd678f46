"""The whole trade-off between memory and time, from one shared search.

Budgets are spread evenly between the smallest peak found and keep-all's. They are solved from the
smallest up, each starting from the schedule of the one below, which fits it too. At the end only
the schedules stay that no other beats in both peak and cost: less memory never costs less.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.solve.auto import Auto
from rekindle.solve.base import Solver, run_solver
from rekindle.solve.smallest import min_budget
from rekindle.solve.wishes import Wishes, as_asked, constrain, meant


@dataclass(frozen=True, slots=True)
class Point:
    """One schedule of the curve; `bound` is a proven lower bound on cost at this peak, or None."""

    peak: int
    cost: int
    schedule: Schedule
    bound: int | None = None


def pareto(
    problem: Problem,
    *,
    num_points: int = 12,
    time_limit_s: float = 60.0,
    seed: int = 0,
    solver: Solver | None = None,
    wishes: Wishes | None = None,
) -> tuple[Point, ...]:
    """The curve, from the smallest peak to keep-all; strictly falling in cost. With wishes, of the
    schedules that keep them, from which keep-all may be missing."""
    if num_points < 2:
        raise ValueError(f"a curve has two points or more, not {num_points}")
    if wishes:
        wanted = meant(problem, wishes)
        made = constrain(problem, wanted)
        curve = pareto(
            made.problem, num_points=num_points, time_limit_s=time_limit_s, seed=seed, solver=solver
        )
        return envelope(
            [_point(problem, as_asked(problem, wanted, made, p.schedule)) for p in curve]
        )
    solver = solver or Auto()
    deadline = time.monotonic() + time_limit_s
    plain = keep_all(problem)
    points = [_point(problem, plain)]
    lowest = _point(problem, min_budget(problem, time_limit_s / (num_points + 1), seed))
    points.append(lowest)
    before: Schedule = lowest.schedule
    ladder = _ladder(lowest.peak, points[0].peak, num_points)
    for k, budget in enumerate(ladder):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        solution = run_solver(
            solver,
            problem,
            budget,
            time_limit_s=left / (len(ladder) - k),
            seed=seed,
            warm_start=before,
        )
        if solution.schedule is not None:
            before = solution.schedule
            points.append(_point(problem, before, solution.bound))
        if solution.stopped_by == "interrupt":
            break
    return envelope(points)


def envelope(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other beats in both peak and cost, by rising peak."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.peak, p.cost)):
        if not best or point.cost < best[-1].cost:
            best.append(point)
    return tuple(best)


def _ladder(low: int, high: int, num_points: int) -> list[int]:
    """The budgets between the two ends; keep-all itself is known."""
    return sorted({low + (high - low) * k // (num_points - 1) for k in range(num_points - 1)})


def _point(problem: Problem, schedule: Schedule, bound: int | None = None) -> Point:
    trace = simulate(problem, schedule)
    return Point(trace.peak, trace.cost, schedule, bound)
