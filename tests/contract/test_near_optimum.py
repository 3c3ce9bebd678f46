"""`auto` beside the optimum that `checkmate` proves, on small graphs captured from real modules.

The problems in tests/instances/captured come from `rekindle.plan(..., profile="estimate")` on a
multilayer perceptron, residual convolutions, a skip connection, attention with its feed-forward
part, and layers of changing width. `checkmate` keeps the listed order; `auto` need not.
"""

from pathlib import Path

import pytest

from rekindle.core import keep_all, read_problem, simulate
from rekindle.core.solution import Status
from rekindle.solve import find_solver, run_solver
from rekindle.solve.auto.auto import Auto

PROVEN = [("attention", 0.8), ("mlp", 0.8), ("mlp", 0.65), ("skip", 0.8), ("widening", 0.8)]


@pytest.mark.parametrize(("name", "share"), PROVEN)
def test_within_two_percent_of_the_proven_optimum(instances: Path, name: str, share: float) -> None:
    problem = read_problem(instances / "captured" / f"{name}.json")
    budget = int(share * simulate(problem, keep_all(problem)).peak)
    exact = run_solver(find_solver("checkmate"), problem, budget, time_limit_s=60)
    assert exact.status is Status.OPTIMAL
    assert exact.schedule is not None
    solution = run_solver(Auto(effort=0.3), problem, budget, time_limit_s=20)
    assert solution.schedule is not None
    trace = simulate(problem, solution.schedule)
    assert trace.peak <= budget
    assert trace.cost <= 1.02 * simulate(problem, exact.schedule).cost


@pytest.mark.slow
def test_a_tight_budget_that_few_methods_meet(instances: Path) -> None:
    """At 65 % `checkmate` needs 55.9 % more time; with another order 17.7 % are enough."""
    problem = read_problem(instances / "captured" / "widening.json")
    base = simulate(problem, keep_all(problem))
    solution = run_solver(Auto(), problem, int(0.65 * base.peak), time_limit_s=40)
    assert solution.schedule is not None
    assert simulate(problem, solution.schedule).cost <= 1.25 * base.cost
