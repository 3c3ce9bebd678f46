"""First schedules within the budget for `checkmate` and `moccasin`, by fast heuristics.

With the listed order kept: the greedy walk (`evict`), the first two steps of `auto` (eviction
policies, save sets) and rebuilding, each along the listed order; a result counts where it is, or
becomes, a staged schedule (`staged_space.staged_like`). They take some seconds up to a few thousand
ops. `auto` itself changes the order of ops, so its schedules are outside of the staged space.
"""

from collections.abc import Iterator, Sequence

from rekindle import _native
from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.solve.auto.auto import Auto
from rekindle.solve.auto.incumbent import alike_values
from rekindle.solve.base import too_large
from rekindle.solve.deadline import TimeLeft
from rekindle.solve.staged.staged_space import staged_like

_WALKS, _TRIES, _REBUILT = 400_000, 200, 60_000  # at most; the first and the last over the ops


def listed_starts(
    problem: Problem, budget: int, time_limit_s: float, seed: int
) -> Iterator[Schedule]:
    """Staged schedules within the budget, none dearer than the one before; none where the
    heuristics find none."""
    time_left = TimeLeft(time_limit_s)
    if too_large(problem) is not None:
        return
    best: tuple[int, list[int]] | None = None  # in any order of first runs: rebuilding starts there
    least: int | None = None  # of what was given out
    for found in _listed(problem, budget, time_left, seed):
        for ops in found:
            trace = simulate(problem, Schedule(tuple(ops)))
            if trace.peak > budget:
                continue
            if best is None or trace.cost < best[0]:
                best = trace.cost, list(ops)
            inside = staged_like(problem, Schedule(tuple(ops)))
            if inside is None:
                continue
            staged = simulate(problem, inside)
            if staged.peak <= budget and (least is None or staged.cost < least):
                least = staged.cost
                yield inside
    num_ops = len(problem.ops)
    if best is None or time_left() <= 0:
        return
    rebuilt, _, ended = _native.large_neighbourhood_search(
        problem.native, [best[1]], budget, [seed], 1 + _REBUILT // num_ops, time_left(), 1, 0.0
    )
    _pass_on(ended)
    for ops in rebuilt:
        inside = staged_like(problem, Schedule(tuple(ops)))
        if inside is not None and simulate(problem, inside).peak <= budget:
            yield inside


def _listed(
    problem: Problem, budget: int, time_left: TimeLeft, seed: int
) -> Iterator[Sequence[Sequence[int]]]:
    num_ops = len(problem.ops)
    order, alike = list(range(num_ops)), alike_values(problem)
    fits, ops = _native.evict(problem.native, order, budget, 40 * num_ops + 1000, time_left() / 8)
    yield [ops] if fits else []
    walks = max(8, min(2000, _WALKS // (num_ops + 1)))
    ops, _, ended = _native.search_policy(
        problem.native, order, alike, [], budget, [seed], walks, time_left() / 4, 1
    )
    yield [ops] if ops else []
    _pass_on(ended)
    moment = problem.loss_op
    if moment is None:
        memory = simulate(problem, keep_all(problem)).memory
        moment = max(range(num_ops), key=memory.__getitem__)
    found, _, ended = _native.search_save_sets(
        problem.native, order, moment, alike, budget, [seed], _TRIES, time_left() / 2, 1
    )
    yield found
    _pass_on(ended)


def auto_start(problem: Problem, budget: int, time_limit_s: float, seed: int) -> Schedule | None:
    """The schedule of `auto`, in an order of its own."""
    if too_large(problem) is not None:
        return None
    solution = Auto(threads=1).solve(problem, budget, time_limit_s=time_limit_s, seed=seed)
    if solution.stopped_by == "interrupt":
        raise KeyboardInterrupt
    return solution.schedule


def _pass_on(ended: str) -> None:
    if ended == "interrupt":
        raise KeyboardInterrupt
