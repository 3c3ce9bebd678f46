"""Golden schedules: fixed problems, and searches that end by their moves and not by a clock."""

from pathlib import Path
from typing import Any
from unittest import mock

from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.core.generate import chain, random_layered, random_problem, transformer, unet
from rekindle.errors import SolverRefused
from rekindle.solve import find_solver, run_solver
from rekindle.solve.anneal.fastsa import FastSA, Reorder
from rekindle.solve.auto import auto
from rekindle.solve.auto.auto import Auto
from rekindle.solve.base import Solver
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.hierarchy.rockmate import Rockmate

INSTANCES = Path(__file__).parent.parent / "instances"
FRACTIONS = (0.8, 0.6)
NO_CLOCK_S = 1e6  # of a time limit that is never reached
_AUTO = "auto"
_EXACT = ("checkmate", "hiremate", "rockmate")  # with programs that take long on the others
_FOR_EXACT = ("captured/skip", "chain")


def problems() -> dict[str, Problem]:
    """The problems by name."""
    names = ("RL1", "RL2", "CM1", "CM2", "captured/attention", "captured/residual", "captured/skip")
    return {
        **{name: read_problem(INSTANCES / f"{name}.json") for name in names},
        "layered": random_layered(60, 3),
        "chain": chain(12),
        "unet": unet(3),
        "transformer": transformer(4, dropout=True),
        "random": random_problem(11, 16),
    }


def solvers() -> dict[str, Solver]:
    """The solvers by the name under which their schedules are recorded."""
    names = ("twremat", "rotor", "rotor-floating", "revolve", "sequential", "checkmate")
    return {
        _AUTO: Auto(max_rounds=2, effort=0.02, threads=1),
        "fastsa": FastSA(num_moves=40_000, num_seeds=2),
        "fastsa-published": FastSA(
            objective="elu", moves="paper", grouping=True, num_moves=20_000, num_seeds=1
        ),
        "reorder": Reorder(num_moves=20_000, num_seeds=2),
        "hiremate": HiRemate(threads=1, polish_moves=5000),
        "rockmate": Rockmate(threads=1),
        **{name: find_solver(name) for name in (*names, "floor", "sqrt", "keep-all")},
    }


def schedules() -> dict[str, dict[str, Any]]:
    """Per problem, solver and budget: how it ended, and the schedule."""
    # The two steps of `auto` that have seconds of their own; a busy machine would cut them short.
    with mock.patch.multiple(auto, BOUND_S=NO_CLOCK_S, SMALLEST_PEAK_S=NO_CLOCK_S):
        return _schedules()


def _schedules() -> dict[str, dict[str, Any]]:
    items: dict[str, dict[str, Any]] = {}
    for name, problem in problems().items():
        peak = simulate(problem, keep_all(problem)).peak
        for label, solver in solvers().items():
            if label in _EXACT and name not in _FOR_EXACT:
                continue
            for fraction in FRACTIONS:
                key = f"{name}/{label}/{fraction}"
                items[key] = _solved(problem, solver, int(fraction * peak))
    return items


def _solved(problem: Problem, solver: Solver, budget: int) -> dict[str, Any]:
    try:
        solution = run_solver(solver, problem, budget, time_limit_s=NO_CLOCK_S)
    except SolverRefused:
        return {"status": "refused"}
    item: dict[str, Any] = {"status": solution.status.name}
    found = solution.schedule
    if found is None and solver.name != _AUTO:  # auto seeks its smallest peak for so many seconds
        found = solution.smallest
    if found is not None:
        trace = simulate(problem, found)
        item |= {"peak": trace.peak, "cost": trace.cost, "schedule": list(found.ops)}
    return item
