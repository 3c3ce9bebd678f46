"""The smallest peak that can be found, so that a budget out of reach is answered with a number."""

import time
from collections.abc import Sequence

from rekindle import _native
from rekindle.core import Problem, Schedule, simulate
from rekindle.solve.auto.start_order import order_for
from rekindle.solve.base import trivial_floor, without_dead_ops
from rekindle.solve.baselines import Sqrt


def min_budget(problem: Problem, time_limit_s: float = 5.0, seed: int = 0) -> Schedule:
    """The schedule with the smallest peak found (ties: the cheaper). Not a proof."""
    small, kept = without_dead_ops(problem)
    best: tuple[int, int, Schedule] | None = None
    for ops in small_peaks(small, seed, time_limit_s):
        schedule = Schedule(tuple(kept[i] for i in ops))
        trace = simulate(problem, schedule)
        if best is None or (trace.peak, trace.cost) < best[:2]:
            best = (trace.peak, trace.cost, schedule)
    assert best is not None
    return best[2]


def small_peaks(problem: Problem, seed: int, time_limit_s: float) -> list[Sequence[int]]:
    """Schedules with small peaks: segments; the greedy walk under ever lower limits, along the
    listed order and along the one that needs least for gradients; annealing."""
    deadline = time.monotonic() + time_limit_s
    floor = trivial_floor(problem)
    listed = list(range(len(problem.ops)))
    found: list[Sequence[int]] = [listed]
    # Nothing fits a budget of 0, so the answer is the smallest peak of all segmentations.
    segments = Sqrt().solve(problem, 0, time_limit_s=time_limit_s / 4, seed=seed).smallest
    if segments is not None:
        found.append(segments.ops)

    def peak(ops: Sequence[int]) -> int:
        return simulate(problem, Schedule(tuple(ops))).peak

    # The rest is the annealer's, which changes the order as well; the walk cannot.
    until = deadline - 0.4 * time_limit_s
    found += _walks(problem, listed, floor, min(peak(ops) for ops in found), until)
    # Only below some budget does another order need less: ask for the least there could be.
    order = order_for(problem, floor, time_limit_s / 10).ops
    if order != listed:
        found += _walks(problem, order, floor, peak(order), until)
    smallest = min(found, key=lambda ops: peak(ops))
    left = deadline - time.monotonic()
    if left > 0.02:
        # The floor as the budget: no peak is below it, so the pressure on memory never ends.
        results, ended = _native.anneal(
            problem.native, [list(smallest), listed], floor,
            _native.Objective.peak, [seed, seed + 1], max(50_000, 2000 * len(listed)), left, 2,
        )  # fmt: skip
        found += [r.best or r.smallest for r in results]
        if ended == "interrupt":
            raise KeyboardInterrupt
    return found


def _walks(
    problem: Problem, order: Sequence[int], low: int, high: int, deadline: float
) -> list[Sequence[int]]:
    """Bisects the limit that the greedy walk along the order meets."""
    found: list[Sequence[int]] = []
    max_steps = 40 * len(order) + 1000
    # The walk is not monotone in its limit, so this finds a limit that it meets, not the least one.
    # To a thousandth: each further bit costs a walk.
    while high - low > high >> 10 and (left := deadline - time.monotonic()) > 0:
        middle = (low + high) // 2
        fits, ops = _native.evict(problem.native, order, middle, max_steps, left)
        if fits:
            found.append(ops)
            high = min(middle, simulate(problem, Schedule(tuple(ops))).peak)
        else:
            low = middle + 1
    return found
