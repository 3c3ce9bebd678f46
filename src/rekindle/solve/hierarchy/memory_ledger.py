"""H-ILP's account of memory (`level_milp`): what is kept between events, and its rows.

A K in [0, 1] for each value from one event (a run that makes or reads it) to the next, as a row: a
column, a sum of columns, or the constant. `read` and `make` add the constraints of an event and
move on to the next K; `others` is what the run at hand does not touch; `budget` notes a row of
bytes, whose right-hand side `set_budgets` sets for each solve.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rekindle.solve.backends.mip import INF, Model
from rekindle.solve.hierarchy.hierarchy_level import Level

ONE = -1  # the column of the constant
Row = dict[int, float]  # column -> factor
MARGIN = 2e-6  # of the budget: above what HiGHS lets a row be violated by


@dataclass(slots=True)
class Ledger:
    """Writes the memory rows of a level's program, step after step."""

    level: Level
    least: int  # no budget below this will be asked for
    model: Model
    kept: dict[int, Row] = field(default_factory=dict, init=False)  # value -> its K now
    phantoms: dict[int, Row] = field(default_factory=dict, init=False)  # layer -> bytes now
    alive: dict[int, int] = field(default_factory=dict, init=False)  # gradients -> bytes
    last_event: dict[int, int] = field(default_factory=dict, init=False)  # value -> step
    now: int = field(default=0, init=False)  # the step at hand
    _budget_rows: list[tuple[int, float, bool]] = field(default_factory=list, init=False)

    def size(self, v: int) -> float:
        return float(self.level.size[v])

    def _next(self, v: int) -> Row:
        """The K from here to the next event: a new column, or nothing after the last one."""
        if v in self.level.final or not self.level.size[v]:
            return {ONE: 1.0}
        # Nothing touches it after this step, so it dies here and needs no column.
        if self.last_event[v] == self.now:
            return {}
        return {self.model.add_column(): 1.0}

    def read(self, v: int, run: Row) -> None:
        before = self.kept.get(v, {})
        if before == {ONE: 1.0}:
            return
        row = dict(before)
        add_to(row, run, -1.0)
        self.row(0.0, row, INF)
        after = self._next(v)
        row = dict(before)
        add_to(row, after, -1.0)
        if after:
            self.row(0.0, row, INF)
        self.kept[v] = after

    def make(self, v: int, run: Row, alone: bool) -> Row:
        """What v takes while the run that makes it is on; sets its K after it."""
        before = self.kept.get(v, {})
        if before == {ONE: 1.0}:
            return before
        fresh = dict(before)
        if before and not alone:
            # Another output of the same run may be what is wanted: v counts once.
            made = self.model.add_column()
            row: Row = {made: 1.0}
            add_to(row, run, -1.0)
            add_to(row, before)
            self.row(0.0, row, INF)
            add_to(fresh, {made: 1.0})
        else:
            add_to(fresh, run)
            if before:
                self.row(-INF, fresh, 1.0)
        after = self._next(v)
        if after and after != {ONE: 1.0}:
            row = dict(before)
            add_to(row, run)
            add_to(row, after, -1.0)
            self.row(0.0, row, INF)
        self.kept[v] = after
        return fresh

    def others(self, touched: Iterable[int]) -> Row:
        """Bytes of the values that the run at hand does not touch, phantoms and gradients."""
        skip = set(touched)
        row: Row = {ONE: float(sum(self.alive.values()))}
        for v, kept in self.kept.items():
            if v not in skip:
                add_to(row, kept, self.size(v))
        for phantom in self.phantoms.values():
            add_to(row, phantom)
        return row

    # -- rows

    def row(self, lower: float, row: Row, upper: float) -> None:
        constant = row.get(ONE, 0.0)
        columns = [c for c, factor in row.items() if c != ONE and factor]
        if not columns:
            if not lower - 1e-9 <= constant <= upper + 1e-9:
                self.model.add_row(1.0, 1.0, (), ())
            return
        self.model.add_row(lower - constant, upper - constant, columns, [row[c] for c in columns])

    def budget(self, row: Row, *, is_save: bool = False) -> None:
        """A row of bytes, in parts of the least budget; its right-hand side comes when solving."""
        if not is_save and sum(factor for factor in row.values() if factor > 0) <= self.least:
            return
        columns = [c for c, factor in row.items() if c != ONE and factor]
        unit = self._unit()
        number = self.model.add_row(-INF, INF, columns, [row[c] / unit for c in columns])
        self._budget_rows.append((number, row.get(ONE, 0.0), is_save))

    def _unit(self) -> float:
        return float(max(1, self.least))

    def set_budgets(self, peak: int, save: int | None) -> None:
        assert peak >= self.least
        for number, constant, is_save in self._budget_rows:
            limit = peak if not is_save else save
            upper = INF if limit is None else (limit - constant) / self._unit() - MARGIN
            self.model.row_upper[number] = upper


def add_to(row: Row, other: Mapping[int, float], factor: float = 1.0) -> None:
    """Adds a multiple of one linear expression to another."""
    for column, value in other.items():
        row[column] = row.get(column, 0.0) + factor * value
