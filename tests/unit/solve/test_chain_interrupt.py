"""Ctrl-C during a chain program, or while options are made, gives the best so far."""

import pytest

from rekindle.core import keep_all, simulate
from rekindle.core.generate import chain, transformer
from rekindle.solve import find_solver, run_solver
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.hierarchy.rockmate import Rockmate

# A search that does not hear the interrupt goes on until pytest ends it.
pytestmark = pytest.mark.timeout(120)
HOUR_S = 3600.0


@pytest.mark.parametrize(("name", "length"), [("rotor", 390), ("rotor-floating", 79)])
def test_ctrl_c_gives_the_best_so_far(name: str, length: int, ctrl_c_after) -> None:
    problem = chain(length)
    budget = int(0.6 * simulate(problem, keep_all(problem)).peak)
    ctrl_c_after(0.3)
    solution = run_solver(find_solver(name), problem, budget, time_limit_s=HOUR_S)
    assert solution.stopped_by == "interrupt"
    if solution.schedule is not None:
        assert simulate(problem, solution.schedule).peak <= budget


def repr_of(solver) -> str:
    return f"{solver.name}-{solver.threads}"


@pytest.mark.parametrize("solver", [Rockmate(), Rockmate(threads=1), HiRemate()], ids=repr_of)
def test_ctrl_c_while_options_are_made_gives_the_best_so_far(solver, ctrl_c_after) -> None:
    """Programs run in several threads, and Ctrl-C reaches the main one alone."""
    problem = transformer(6, batch=16, dropout=True)
    budget = int(0.6 * simulate(problem, keep_all(problem)).peak)
    ctrl_c_after(1.0)
    solution = run_solver(solver, problem, budget, time_limit_s=HOUR_S)
    assert solution.stopped_by == "interrupt"
    assert solution.schedule is not None
    assert simulate(problem, solution.schedule).peak <= budget
