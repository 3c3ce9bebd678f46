"""All solvers, in order of preference. One explicit tuple; nothing registers itself."""

from difflib import get_close_matches

from rekindle.errors import SolverUnavailable
from rekindle.solve.base import Solver
from rekindle.solve.baselines import Floor, KeepAll, Sqrt
from rekindle.solve.checkmate import Checkmate
from rekindle.solve.hiremate import HiRemate
from rekindle.solve.moccasin import Moccasin
from rekindle.solve.rockmate import Rockmate
from rekindle.solve.rotor import Revolve, Rotor, RotorFloating, Sequential
from rekindle.solve.twremat import TWRemat

SOLVERS: tuple[Solver, ...] = (
    HiRemate(),
    Rockmate(),
    Checkmate(),
    Moccasin(),
    TWRemat(),
    Rotor(),
    RotorFloating(),
    Revolve(),
    Sequential(),
    Sqrt(),
    Floor(),
    KeepAll(),
)


def find_solver(solver: str | Solver) -> Solver:
    """The solver of that name, or the instance itself."""
    if not isinstance(solver, str):
        return solver
    for known in SOLVERS:
        if known.name == solver:
            return known
    names = [known.name for known in SOLVERS]
    close = get_close_matches(solver, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise SolverUnavailable(
        f"there is no solver {solver[:40]!r}{hint} The solvers are {', '.join(names)}"
    )
