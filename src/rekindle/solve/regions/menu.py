"""The ways in which one region may run: schedules of its own problem, with what each keeps between
its forward and its backward, what each needs while it runs, and what it costs.

In the problem of a region the loss stands for all that runs between its forward and its backward.
What a schedule keeps over the loss is there while every later region runs, so a menu spans two
limits: on what is kept (`loss` needs so much more that only a schedule that keeps less fits) and on
what is needed while the region runs. All numbers are of copies as `core.simulate` makes them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rekindle import _native
from rekindle.core import Problem, Schedule, copies, keep_all, simulate
from rekindle.errors import RekindleError
from rekindle.solve.base import Solver, run_solver
from rekindle.solve.deadline import TimeLeft

_KEPT = (0.0, 0.25, 0.5, 0.75)  # shares of what eager keeps over the loss
_NEEDED = (1.0, 0.7)  # shares of what the way that keeps least needs in the backward


@dataclass(frozen=True, slots=True)
class RegionOption:
    """One schedule of a region's problem, without its loss."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    cost: int
    kept: int  # bytes between the forward and the backward
    forward_peak: int
    backward_peak: int  # what is kept included, the gradients that arrive not

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        return self.cost, self.kept, self.forward_peak, self.backward_peak


def option_of(problem: Problem, schedule: Schedule) -> RegionOption:
    """The schedule with its numbers."""
    loss = problem.loss_op
    assert loss is not None
    # The gradients that arrive are somebody else's, and so are the outputs once they are given.
    sizes = list(problem.values)
    for v in problem.ops[loss].outputs:
        sizes[v] = replace(sizes[v], size=0)
    alone = replace(problem, values=tuple(sizes), held=())
    at = schedule.ops.index(loss)
    memory = simulate(alone, schedule).memory
    made = copies(alone, schedule)
    return RegionOption(
        schedule.ops[:at],
        schedule.ops[at + 1 :],
        sum(problem.ops[i].cost for i in schedule.ops),
        sum(sizes[c.value_id].size for c in made if c.first < at < c.last),
        max(memory[:at], default=0),
        max(memory[at + 1 :], default=0),
    )


def eager_option(problem: Problem) -> RegionOption:
    """Everything runs once, in eager's order."""
    return option_of(problem, keep_all(problem))


def keeps_inputs_only(problem: Problem) -> RegionOption:
    """All that may run again does, at the begin of the backward."""
    loss = problem.loss_op
    assert loss is not None
    forward = tuple(range(loss))
    again = tuple(i for i in forward if not problem.ops[i].once)
    backward = tuple(range(loss + 1, len(problem.ops)))
    ops = _native.drop_dead_runs(problem.native, [*forward, loss, *again, *backward])
    # An effect of the forward has no reader: it stays where it was.
    missing = set(forward).difference(ops)
    at = ops.index(loss)
    first = sorted({*ops[:at], *missing})
    return option_of(problem, Schedule((*first, *ops[at:])))


def menu_of(problem: Problem, solver: Solver, time_limit_s: float) -> tuple[RegionOption, ...]:
    """Options of which none is worse than another in every number; the cheapest first."""
    whole, least = eager_option(problem), keeps_inputs_only(problem)
    found = [whole, least]
    left = TimeLeft(time_limit_s)
    loss = problem.loss_op
    assert loss is not None
    room = problem.ops[loss].workspace
    given = _given_bytes(problem)
    grid = [(kept, needed) for needed in _NEEDED for kept in _KEPT]
    for n, (kept, needed) in enumerate(grid):
        limit_s = left() / (len(grid) - n)
        if limit_s <= 0.01 or whole.kept == least.kept:
            break
        budget = int(needed * max(whole.backward_peak, least.backward_peak)) + given
        most = int(least.kept + kept * (whole.kept - least.kept)) + given
        ops = list(problem.ops)
        ops[loss] = replace(ops[loss], workspace=room + max(0, budget - most))
        tight = replace(problem, ops=tuple(ops), held=())
        try:
            solution = run_solver(solver, tight, budget, time_limit_s=limit_s, warm_start=None)
        except RekindleError:
            continue
        if solution.schedule is not None:
            found.append(option_of(problem, solution.schedule))
    return undominated(found)


def _given_bytes(problem: Problem) -> int:
    """What stands at the loss whatever is kept: the outputs, and the gradients that arrive."""
    loss = problem.loss_op
    assert loss is not None
    resident = set(problem.resident)
    op = problem.ops[loss]
    values = [v for v in (*op.inputs, *op.outputs) if v not in resident]
    return sum(problem.values[v].size for v in values)


def undominated(found: Iterable[RegionOption]) -> tuple[RegionOption, ...]:
    """Without those that another one is no worse than."""
    kept: list[RegionOption] = []
    for option in sorted(found, key=lambda o: o.numbers):
        if not any(_no_worse(other, option) for other in kept):
            kept.append(option)
    return tuple(kept)


def _no_worse(a: RegionOption, b: RegionOption) -> bool:
    pairs: Sequence[tuple[int, int]] = list(zip(a.numbers, b.numbers, strict=True))
    return all(x <= y for x, y in pairs)
