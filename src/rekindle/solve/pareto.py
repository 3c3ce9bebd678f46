"""The whole trade-off between memory and time, from one shared search.

Budgets are spread evenly between the smallest peak found and keep-all's. They are solved from the
smallest up, each starting from the schedule of the one below, which fits it too. At the end only
the schedules stay that no other beats in both peak and cost: less memory never costs less.

`Ladder` gives the same promise to calls that know nothing of each other: its rungs depend on the
problem alone, and an answer is the last of a chain of searches from the lowest rung up to the one
at or below the budget, each starting from the one below. The chain of a smaller budget is the
beginning of that of a larger one, so a smaller budget never gives a cheaper schedule. That holds
as long as no clock ends a search (`Auto` ends by itself after `max_rounds`). Of `auto` alone it
holds where both answers are proven optimal; any other finds what it finds, and two budgets close to
each other may come out the wrong way round by what such a search leaves to gain.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.solve.auto.auto import Auto
from rekindle.solve.base import Solver, best_solution, run_solver, trivial_floor, without_dead_ops
from rekindle.solve.constraints import Constraints, constrain, resolve, to_original
from rekindle.solve.min_budget import min_budget


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
    constraints: Constraints | None = None,
) -> tuple[Point, ...]:
    """The curve, from the smallest peak to keep-all; strictly falling in cost. With constraints, of
    the schedules that keep them, from which keep-all may be missing. An interrupt ends the search
    and gives what was found."""
    if num_points < 2:
        raise ValueError(f"a curve has two points or more, not {num_points}")
    if constraints:
        resolved = resolve(problem, constraints)
        made = constrain(problem, resolved)
        curve = pareto(
            made.problem, num_points=num_points, time_limit_s=time_limit_s, seed=seed, solver=solver
        )
        return envelope(
            [point_of(problem, to_original(problem, resolved, made, p.schedule)) for p in curve]
        )
    solver = solver or Auto()
    deadline = time.monotonic() + time_limit_s
    plain = keep_all(problem)
    least = sum(op.cost for op in without_dead_ops(problem)[0].ops)  # each runs at least once
    points = [point_of(problem, plain, least)]
    with contextlib.suppress(KeyboardInterrupt):  # the points so far are the answer
        # The smallest peak has the share of the time that every other point has.
        lowest = point_of(problem, min_budget(problem, time_limit_s / (num_points + 1), seed))
        points.append(lowest)
        before: Schedule = lowest.schedule
        ladder = _ladder(lowest.peak, points[0].peak, num_points)
        for k, budget in enumerate(ladder):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # From the smallest budget up, since a schedule for less memory fits more of it and is a
            # warm start as it is; downwards each would have to be repaired first.
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
                points.append(point_of(problem, before, solution.bound))
            if solution.stopped_by == "interrupt":
                break
    return envelope(points)


@dataclass(frozen=True, slots=True)
class Ladder:
    """A solver whose answers never cost less for a smaller budget, at the price of a search per
    rung, and of the memory between the budget and the rung below it."""

    solver: Solver = field(default_factory=Auto)
    rungs: int = 16  # between the smallest budget that is not hopeless by inspection and keep-all

    name: ClassVar[str] = "ladder"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return self.solver.accepts(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        deadline = time.monotonic() + time_limit_s
        plain = keep_all(problem)
        low, high = trivial_floor(problem), simulate(problem, plain).peak
        found: Schedule | None = None  # a warm start of the caller's would end the promise
        ended: set[str] = set()
        last: Solution | None = None
        # A set: in a small problem several rungs may be one number of bytes.
        steps = {low + (high - low) * k // self.rungs for k in range(self.rungs + 1)}
        below = sorted(rung for rung in steps if rung <= budget)
        for k, rung in enumerate(below):
            left = max(0.0, deadline - time.monotonic()) / (len(below) - k)
            last = self.solver.solve(problem, rung, time_limit_s=left, seed=seed, warm_start=found)
            found = last.schedule or found
            ended.add(last.stopped_by)
            if last.stopped_by == "interrupt":
                break
        # Of the chain the last schedule is the cheapest, as each search began from the one before.
        candidates = [s.ops for s in (found, last.smallest if last else None, plain) if s]
        clock = ended & {"time limit", "interrupt"}
        stopped_by = min(clock) if clock else (last.stopped_by if last else "proof")
        # The bound of the rung is for a smaller budget than the one asked for.
        return best_solution(
            problem,
            budget,
            candidates,
            solver=self.name,
            bound=last.bound if last is not None and below[-1] == budget else None,
            stopped_by=stopped_by,
            notes=last.notes if last is not None else (),
        )


def envelope(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other beats in both peak and cost, by rising peak."""
    best: list[Point] = []
    # By rising peak: a point stays if it is cheaper than all that need less memory.
    for point in sorted(points, key=lambda p: (p.peak, p.cost)):
        if not best or point.cost < best[-1].cost:
            best.append(point)
    return tuple(best)


def _ladder(low: int, high: int, num_points: int) -> list[int]:
    """The budgets between the two ends; keep-all itself is known."""
    return sorted({low + (high - low) * k // (num_points - 1) for k in range(num_points - 1)})


def point_of(problem: Problem, schedule: Schedule, bound: int | None = None) -> Point:
    """Where a schedule stands."""
    trace = simulate(problem, schedule)
    return Point(trace.peak, trace.cost, schedule, bound)
