"""Every method is a solver under its own name behind one contract; see `base` and `registry`."""

from rekindle.solve.base import Solver, run_solver
from rekindle.solve.progress import Progress, listen
from rekindle.solve.registry import SOLVERS, default_solver, find_solver

__all__ = ["SOLVERS", "Progress", "Solver", "default_solver", "find_solver", "listen", "run_solver"]
