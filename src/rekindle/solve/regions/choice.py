"""Which option each call of a region runs by: a mixed-integer program over the menus.

    minimise    sum of the costs of the chosen options
    one option of each call                                             (`_one_each`)
    at each moment: what is there anyway + what open calls keep
        + what the call that runs at that moment needs <= budget        (`_rows`)

A call is open from its forward to its backward. The numbers of a menu are upper bounds (a kept
output counts for its region even while the next one holds it too), so the caller simulates what was
chosen and may ask again with the bytes that were counted twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rekindle.solve.backends.mip import INF, Model, solve_mip
from rekindle.solve.regions.menu import RegionOption


@dataclass(frozen=True, slots=True)
class Moment:
    """A time at which memory may peak."""

    anyway: int  # bytes that no option changes
    open: tuple[int, ...]  # calls
    runs: int | None = None  # the call whose forward or backward it is
    phase: Literal["forward", "backward"] = "forward"


def choose_options(
    menus: Sequence[Sequence[RegionOption]],
    moments: Sequence[Moment],
    budget: int | None,
    time_limit_s: float,
) -> list[int] | None:
    """Per call the position in its menu; None where nothing fits. Without a budget, the choice with
    the smallest peak."""
    moments = _that_matter(moments)
    unit = float(max([budget or 0, *(m.anyway for m in moments), 1]))
    dearest = float(max([o.cost for menu in menus for o in menu], default=1) or 1)
    model = Model()
    columns = [
        [model.add_column(0.0 if budget is None else o.cost / dearest, integer=True) for o in menu]
        for menu in menus
    ]
    peak = None if budget is not None else model.add_column(1.0, 0.0, INF)
    _one_each(model, columns)
    _rows(model, menus, columns, moments, unit, budget, peak)
    result = solve_mip(model, time_limit_s=time_limit_s, rel_gap=1e-3, threads=1)
    if result.x is None:
        return None
    x = result.x
    # One column of each row is 1, to a tolerance.
    return [int(np.argmax([x[column] for column in row])) for row in columns]


def _one_each(model: Model, columns: Sequence[Sequence[int]]) -> None:
    for row in columns:
        model.add_row(1.0, 1.0, row, [1.0] * len(row))


def _rows(
    model: Model,
    menus: Sequence[Sequence[RegionOption]],
    columns: Sequence[Sequence[int]],
    moments: Sequence[Moment],
    unit: float,
    budget: int | None,
    peak: int | None,
) -> None:
    for moment in moments:
        place: list[int] = []
        entries: list[float] = []
        for k in moment.open:
            for column, option in zip(columns[k], menus[k], strict=True):
                if option.kept:
                    place.append(column)
                    entries.append(option.kept / unit)
        if moment.runs is not None:
            for column, option in zip(columns[moment.runs], menus[moment.runs], strict=True):
                forward = moment.phase == "forward"
                needs = option.forward_peak if forward else option.backward_peak
                place.append(column)
                entries.append(needs / unit)
        limit = -moment.anyway / unit
        if peak is None:
            assert budget is not None
            limit += budget / unit
        else:
            place.append(peak)
            entries.append(-1.0)
        if place:
            model.add_row(-INF, limit, place, entries)


def _that_matter(moments: Sequence[Moment]) -> list[Moment]:
    """Of moments with the same calls, the one with most there anyway."""
    best: dict[tuple[tuple[int, ...], int | None, str], Moment] = {}
    for moment in moments:
        key = (moment.open, moment.runs, moment.phase)
        if key not in best or best[key].anyway < moment.anyway:
            best[key] = moment
    return list(best.values())
