"""The schedules of the steps of a model in regions: menus and moments go to `choose_options`, and
what it chose to the simulator, until what is counted twice is worth no further round.

A model may have several steps, where Python takes one way or another. Each is a problem of its own;
a call that is in several of them runs by one option, and every step stays within the budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rekindle.core import Schedule, Trace, simulate
from rekindle.solve.deadline import TimeLeft
from rekindle.solve.regions.choice import Moment, choose_options
from rekindle.solve.regions.menu import RegionOption
from rekindle.solve.regions.step_problem import Key, StepProblem

_MOST_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Chosen:
    """Options of calls, with the schedules that they make, as they were simulated."""

    options: Mapping[Key, RegionOption]
    schedules: tuple[Schedule, ...]  # per step
    traces: tuple[Trace, ...]

    @property
    def peak(self) -> int:
        return max(trace.peak for trace in self.traces)

    @property
    def cost(self) -> int:
        return sum(trace.cost for trace in self.traces)


def simulated(steps: Sequence[StepProblem], options: Mapping[Key, RegionOption]) -> Chosen:
    """The schedules of these options, counted."""
    schedules = tuple(step.schedule([options[c.key] for c in step.calls]) for step in steps)
    pairs = zip(steps, schedules, strict=True)
    return Chosen(options, schedules, tuple(simulate(s.problem, x) for s, x in pairs))


def search_options(
    steps: Sequence[StepProblem],
    menus: Mapping[Key, Sequence[RegionOption]],
    budget: int,
    time_limit_s: float,
) -> tuple[Chosen | None, Chosen]:
    """The cheapest choice found within the budget, or None; and the one of the smallest peak."""
    left = TimeLeft(time_limit_s)
    keys = list(menus)
    place = {key: k for k, key in enumerate(keys)}
    moments = [moment for step in steps for moment in moments_of(step, place)]
    rows = [menus[key] for key in keys]

    def counted(at: Sequence[int]) -> Chosen:
        chosen = {key: row[o] for key, row, o in zip(keys, rows, at, strict=True)}
        return simulated(steps, chosen)

    smallest = counted([min(range(len(row)), key=lambda o: row[o].kept) for row in rows])
    best: Chosen | None = None
    target = budget
    for _ in range(_MOST_ROUNDS):
        limit_s = max(0.05, left() / 2)
        at = choose_options(rows, moments, target, limit_s)
        if at is None and best is None:  # by upper bounds: another choice may fit all the same
            at = choose_options(rows, moments, None, limit_s)
        if at is None:
            break
        found = counted(at)
        smallest = min(smallest, found, key=lambda f: (f.peak, f.cost))
        excess = found.peak - budget
        if excess <= 0 and (best is None or found.cost < best.cost):
            best = found
        elif best is not None:
            break
        if -budget // 500 < excess <= 0 or left() <= 0:
            break
        target = (target if excess <= 0 else min(target, budget)) - excess
    if smallest.peak <= budget and (best is None or smallest.cost < best.cost):
        best = smallest
    return best, smallest


def moments_of(step: StepProblem, place: Mapping[Key, int]) -> list[Moment]:
    """One per event: what is there whatever is chosen, and which calls are open."""
    num = len(step.events)
    change = [0] * (num + 1)

    def there(size: int, first: int, last: int) -> None:
        if first <= last:
            change[first] += size
            change[last + 1] -= size

    begun = {e.call: t for t, e in enumerate(step.events) if e.kind == "forward"}
    ended = {e.call: t for t, e in enumerate(step.events) if e.kind == "backward"}
    made_by_region: set[int] = set()
    final: set[int] = set()
    for k, call in enumerate(step.calls):
        made_by_region.update(call.given.values(), call.gradients.values())
        final.update(call.gradients[v] for v in call.final if v in call.gradients)
        for v in call.final:
            if k in ended:
                there(call.problem.values[v].size, ended[k] + 1, num - 1)
    for s, storage in enumerate(step.storages):
        if s not in final:
            last = num - 1 if storage.died is None or s in step.held else storage.died
            # While the region itself runs, its own numbers have what it makes.
            there(storage.size, storage.born + (s in made_by_region), last)
    moments, anyway = [], 0
    for t, event in enumerate(step.events):
        anyway += change[t]
        is_open = tuple(
            place[step.calls[k].key]
            for k, b in begun.items()
            if b < t < ended.get(k, num) and k != event.call
        )
        if event.kind in ("forward", "backward"):
            phase: Literal["forward", "backward"] = "forward"
            if event.kind == "backward":
                phase = "backward"
            runs = place[step.calls[event.call].key]
            moments.append(Moment(anyway, is_open, runs, phase))
        else:
            moments.append(Moment(anyway, is_open))
    return moments
