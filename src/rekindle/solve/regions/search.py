"""The schedule of a step in regions: menus and moments to `choose_options`, and what it chose to the
simulator, until what is counted twice is worth no further round."""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core import Schedule, Trace, simulate
from rekindle.solve.deadline import TimeLeft
from rekindle.solve.regions.choice import Moment, choose_options
from rekindle.solve.regions.menu import RegionOption
from rekindle.solve.regions.step_problem import StepProblem

_MOST_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """What was chosen, as it was simulated."""

    chosen: tuple[RegionOption, ...]  # per call
    schedule: Schedule
    trace: Trace


def moments_of(step: StepProblem) -> list[Moment]:
    """One per event: what is there whatever is chosen, and which calls are open."""
    num = len(step.events)
    change = [0] * (num + 1)

    def there(size: int, first: int, last: int) -> None:
        if first <= last:
            change[first] += size
            change[last + 1] -= size

    begun = {e.call: t for t, e in enumerate(step.events) if e.kind == "forward"}
    ended = {e.call: t for t, e in enumerate(step.events) if e.kind == "backward"}
    made_by_region = set()
    for k, call in enumerate(step.calls):
        for s in (*call.given.values(), *call.gradients.values()):
            made_by_region.add(s)
        for v in call.final:
            if k in ended:
                there(call.problem.values[v].size, ended[k] + 1, num - 1)
    final = {call.gradients[v] for call in step.calls for v in call.final if v in call.gradients}
    for s, storage in enumerate(step.storages):
        if s in final:
            continue
        last = num - 1 if storage.died is None or s in step.held else storage.died
        # While the region itself runs, its own numbers have what it makes.
        there(storage.size, storage.born + (s in made_by_region), last)
    moments, anyway = [], 0
    for t, event in enumerate(step.events):
        anyway += change[t]
        is_open = tuple(
            k for k, b in begun.items() if b < t < ended.get(k, num) and k != event.call
        )
        if event.kind in ("forward", "backward"):
            phase = "forward" if event.kind == "forward" else "backward"
            moments.append(Moment(anyway, is_open, event.call, phase))
        else:
            moments.append(Moment(anyway, is_open))
    return moments


def simulated(step: StepProblem, chosen: Sequence[RegionOption]) -> StepSchedule:
    """The schedule of these options, counted."""
    schedule = step.schedule(chosen)
    return StepSchedule(tuple(chosen), schedule, simulate(step.problem, schedule))


def search_options(
    step: StepProblem,
    menus: Sequence[Sequence[RegionOption]],
    budget: int,
    time_limit_s: float,
) -> tuple[StepSchedule | None, StepSchedule]:
    """The cheapest schedule found within the budget, or None; and the one of the smallest peak."""
    left = TimeLeft(time_limit_s)
    moments = moments_of(step)
    best: StepSchedule | None = None
    smallest = simulated(step, [min(menu, key=lambda o: o.kept) for menu in menus])
    target = budget
    for _ in range(_MOST_ROUNDS):
        limit_s = max(0.05, left() / 2)
        at = choose_options(menus, moments, target, limit_s)
        if at is None:
            if target >= budget:  # by upper bounds: another choice may fit all the same
                at = choose_options(menus, moments, None, limit_s)
            if at is None:
                break
        found = simulated(step, [menu[o] for menu, o in zip(menus, at, strict=True)])
        smallest = min(smallest, found, key=lambda f: (f.trace.peak, f.trace.cost))
        excess = found.trace.peak - budget
        if excess <= 0 and (best is None or found.trace.cost < best.trace.cost):
            best = found
        elif best is not None:
            break
        target = target - excess if excess <= 0 else min(target, budget) - excess
        if -budget // 500 < excess <= 0 or left() <= 0:
            break
    if best is None and smallest.trace.peak <= budget:
        best = smallest
    return best, smallest
