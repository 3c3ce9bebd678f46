"""Mixed-integer programs, whichever library solves them: the model, the results, and `solve_mip`.

A backend is a module with a function `solve_mip` of the signature of `MIPSolver`. It

- solves to a proof, the time limit, an interrupt, or until `enough(objective, bound)` is true;
- takes a start, and completes what the start leaves out;
- calls `on_progress` with each new incumbent or bound, in the caller's thread, never after it has
  returned;
- returns what it has with `interrupted` set on Ctrl-C, and does not raise KeyboardInterrupt.

`highs` is always there; `gurobi` is taken where it is installed with a licence that allows the
model. A backend more is a module more and a line in `solve_mip`.

Callers should scale: right-hand sides and costs near 1, since the tolerances of the libraries are
absolute (HiGHS: 1e-6 for the rows and the integers of a MIP).
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Backend = Literal["auto", "highs", "gurobi"]
INF = float("inf")


class Outcome(Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    STOPPED = "stopped"  # by a limit, an interrupt or `enough`
    ERROR = "error"


@dataclass(slots=True)
class Model:
    """min cost x, lower <= x <= upper, row_lower <= A x <= row_upper; built row by row."""

    cost: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    row_lower: list[float] = field(default_factory=list)
    row_upper: list[float] = field(default_factory=list)
    # Rows by compressed sparse rows: row r has columns[starts[r] : starts[r + 1]].
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)

    def add_column(
        self, cost: float = 0.0, lower: float = 0.0, upper: float = 1.0, *, integer: bool = False
    ) -> int:
        self.cost.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def add_row(
        self, lower: float, upper: float, columns: Sequence[int], entries: Sequence[float]
    ) -> int:
        """`columns` without repeats."""
        # HiGHS refuses a column that stands twice in a row, so callers add such entries up.
        self.row_lower.append(lower)
        self.row_upper.append(upper)
        self.columns.extend(columns)
        self.entries.extend(entries)
        self.starts.append(len(self.columns))
        return len(self.row_lower) - 1


@dataclass(frozen=True, slots=True)
class LPResult:
    """Of a relaxation; no numbers where it is not optimal."""

    outcome: Outcome
    objective: float = INF
    x: Floats | None = None
    reduced_costs: Floats | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class MIPResult:
    """The best solution found, if any, and the bound that is proven."""

    outcome: Outcome
    objective: float = INF  # of x
    x: Floats | None = None
    # Of the objective as the model has it; callers who scale their costs scale it back.
    bound: float = -INF  # no solution costs less
    interrupted: bool = False


OnProgress = Callable[[float, float, Floats | None], None]  # objective, bound, x where it is new
Enough = Callable[[float, float], bool]  # objective, bound


class MIPSolver(Protocol):
    """What a backend module's `solve_mip` is."""

    def __call__(
        self,
        model: Model,
        *,
        time_limit_s: float,
        start: Mapping[int, float],
        seed: int,
        rel_gap: float,
        threads: int,
        on_progress: OnProgress | None,
        enough: Enough | None,
    ) -> MIPResult: ...


def solve_mip(
    model: Model,
    *,
    time_limit_s: float,
    start: Mapping[int, float] | None = None,
    seed: int = 0,
    rel_gap: float = 0.0,
    threads: int = 0,
    on_progress: OnProgress | None = None,
    enough: Enough | None = None,
    backend: Backend = "auto",
) -> MIPResult:
    """`start` gives columns their values; those it leaves out are completed by the solver.
    `enough(objective, bound)` may end the search early. `threads` 0: the library's choice."""
    # "auto" may take another backend for another model: the licence of gurobipy's wheel has a limit
    # on size. Within one search that only changes how fast it is, as every answer is checked by
    # simulation.
    return _choose(backend, model)(
        model,
        time_limit_s=time_limit_s,
        start=start or {},
        seed=seed,
        rel_gap=rel_gap,
        threads=threads,
        on_progress=on_progress,
        enough=enough,
    )


def _choose(backend: Backend, model: Model) -> MIPSolver:
    # Imported here, so that a process that solves no program loads no library.
    if backend == "gurobi" or (
        backend == "auto" and importlib.util.find_spec("gurobipy") is not None
    ):
        from rekindle.solve.backends import gurobi

        if backend == "gurobi" or gurobi.licensed_for(model):
            return gurobi.solve_mip
    from rekindle.solve.backends import highs

    return highs.solve_mip
