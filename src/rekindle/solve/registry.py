"""All solvers, in order of preference. One explicit tuple; nothing registers itself."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from rekindle.core import Problem
from rekindle.errors import SolverUnavailable, no_such
from rekindle.solve.anneal.fastsa import FastSA, Reorder
from rekindle.solve.auto.auto import Auto
from rekindle.solve.base import Solver, unavailable, without_dead_ops
from rekindle.solve.baselines import Floor, KeepAll, Sqrt
from rekindle.solve.chains.rotor import Revolve, Rotor, RotorFloating, Sequential
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.hierarchy.rockmate import Rockmate
from rekindle.solve.staged.checkmate import Checkmate
from rekindle.solve.staged.checkmate_lp import CheckmateLP
from rekindle.solve.staged.moccasin import Moccasin
from rekindle.solve.twremat import TWRemat

# The order is that in which `default_solver` tries them and `rekindle solvers` lists them: what
# works at any size first, then methods for chains, exact ones for small problems, and the
# baselines.
SOLVERS: tuple[Solver, ...] = (
    Auto(),
    HiRemate(),
    Rockmate(),
    FastSA(),
    TWRemat(),
    Rotor(),
    RotorFloating(),
    Revolve(),
    Sequential(),
    Reorder(),
    Checkmate(),
    Moccasin(),
    CheckmateLP(),
    Floor(),
    Sqrt(),
    KeepAll(),
)


def find_solver(solver: str | Solver) -> Solver:
    """The solver of that name, or the instance itself."""
    if not isinstance(solver, str):
        return solver
    for known in SOLVERS:
        if known.name == solver:
            return known
    raise SolverUnavailable(no_such("solver", solver, (known.name for known in SOLVERS)))


def with_gap(solver: Solver, gap: float) -> Solver:
    """The solver with another gap at which it stops, if it has that option."""
    if not is_dataclass(solver) or all(f.name != "gap" for f in fields(solver)):
        return solver
    return cast(Solver, replace(cast(Any, solver), gap=gap))


def default_solver(problem: Problem) -> Solver:
    """The first in order of preference that is installed and handles the problem."""
    # `accepts` is asked about the problem that `run_solver` will hand over.
    small, _ = without_dead_ops(problem)
    for solver in SOLVERS:
        if unavailable(solver) is None and solver.accepts(small) is None:
            return solver
    raise SolverUnavailable("no installed solver handles this problem; see `rekindle solvers`")
