"""How a schedule is chosen: what the device's allocator makes of it counts."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from rekindle.choose import Choice, choose
from rekindle.core import Problem, Schedule, Solution, Status, keep_all, simulate
from rekindle.core.generate import chain
from rekindle.errors import BudgetInfeasible


@dataclass(frozen=True)
class Recorder:
    """Answers keep-all, and writes down the budgets that it was asked for."""

    stopped_by: str
    budgets: list[int] = field(default_factory=list)

    name: ClassVar[str] = "recorder"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, budget: int, **_: Any) -> Solution:
        self.budgets.append(budget)
        return Solution(
            status=Status.FEASIBLE,
            schedule=keep_all(problem),
            solver=self.name,
            stopped_by=self.stopped_by,
        )


@dataclass(frozen=True)
class Generous:
    """Blocks turn out larger than their requests, by 4 % once something was solved."""

    problem: Problem
    asked: list[Schedule] = field(default_factory=list)

    def peak_bytes(self, schedule: Schedule) -> int:
        self.asked.append(schedule)
        peak = simulate(self.problem, schedule).peak
        return peak if len(self.asked) == 1 else peak + peak // 25


def test_a_budget_that_is_met_is_solved_once() -> None:
    problem = chain(6)
    solver = Recorder("no improvement")
    predictor: Any = Generous(problem)
    budget = 2 * simulate(problem, keep_all(problem)).peak
    solution, kept = choose(Choice(solver=solver, cache=False), predictor, budget)
    assert solution.schedule is not None
    assert not kept
    assert solver.budgets == [budget]


def test_an_interrupt_ends_the_search_for_a_budget_that_the_allocator_keeps() -> None:
    problem = chain(6)
    solver = Recorder("interrupt")
    predictor: Any = Generous(problem)
    budget = simulate(problem, keep_all(problem)).peak
    with pytest.raises(BudgetInfeasible):
        choose(Choice(solver=solver, cache=False), predictor, budget)
    assert solver.budgets == [budget]
