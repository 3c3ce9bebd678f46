"""How a schedule is chosen: what the device's allocator makes of it counts."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from rekindle.core import Problem, Schedule, Solution, Status, keep_all, simulate
from rekindle.core.generate import chain, transformer
from rekindle.errors import BudgetInfeasible
from rekindle.plans.options import Options
from rekindle.solve import find_solver, run_solver
from rekindle.solving import choose


@dataclass(frozen=True)
class Recorder:
    """Answers keep-all, and writes down what it was asked for."""

    stopped_by: str
    budgets: list[int] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)
    warm_starts: list[Schedule | None] = field(default_factory=list)

    name: ClassVar[str] = "recorder"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return None

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        self.budgets.append(budget)
        self.limits_s.append(time_limit_s)
        self.warm_starts.append(warm_start)
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

    @property
    def keep_all_bytes(self) -> int:
        return simulate(self.problem, keep_all(self.problem)).peak

    def needed_bytes(self, schedule: Schedule) -> int:
        peak = simulate(self.problem, schedule).peak
        return peak + peak // 25


def test_a_budget_that_is_met_is_solved_once() -> None:
    problem = chain(6)
    solver = Recorder("no improvement")
    predictor: Any = Generous(problem)
    budget = 2 * simulate(problem, keep_all(problem)).peak
    choice = choose(Options(solver=solver, cache=False), predictor, budget)
    assert choice.solution.schedule is not None
    assert not choice.kept
    assert choice.budget_bytes == budget
    assert solver.budgets == [budget]


def test_an_interrupt_ends_the_search_for_a_budget_that_the_allocator_keeps() -> None:
    problem = chain(6)
    solver = Recorder("interrupt")
    predictor: Any = Generous(problem)
    budget = simulate(problem, keep_all(problem)).peak
    with pytest.raises(KeyboardInterrupt):  # what was found does not fit: nothing to go on with
        choose(Options(solver=solver, cache=False), predictor, budget)
    assert solver.budgets == [budget]


def test_an_interrupt_is_told_with_the_best_so_far(caplog: pytest.LogCaptureFixture) -> None:
    problem = chain(6)
    predictor: Any = Generous(problem)
    budget = 2 * simulate(problem, keep_all(problem)).peak
    choice = choose(Options(solver=Recorder("interrupt"), cache=False), predictor, budget)
    assert choice.solution.schedule == keep_all(problem)
    assert caplog.messages == ["interrupted; best so far +0.0 %, press Ctrl-C again to stop"]


@dataclass(frozen=True)
class NeverEnough(Generous):
    """Whatever is chosen takes a byte more than there is."""

    budget: int = 0

    def needed_bytes(self, schedule: Schedule) -> int:
        return self.budget + 1


def test_d3_all_tries_together_have_the_time_that_was_given() -> None:
    """Each begins with the schedule of the one before."""
    problem = chain(6)
    solver = Recorder("time limit")
    budget = 2 * simulate(problem, keep_all(problem)).peak
    predictor: Any = NeverEnough(problem, budget)
    with pytest.raises(BudgetInfeasible):
        choose(Options(solver=solver, time_limit_s=8.0, cache=False), predictor, budget)
    assert solver.limits_s == [6.0, 1.0, 0.5, 0.5]
    assert solver.budgets == sorted(set(solver.budgets), reverse=True)
    assert solver.warm_starts == [None, *[keep_all(problem)] * 3]


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_a_second_try_costs_little(share: float) -> None:
    """Four percent less memory than asked for is found in half of the time, at hardly any cost."""
    problem = transformer(24)
    predictor: Any = Generous(problem)
    base = simulate(problem, keep_all(problem))
    budget = int(share * base.peak)
    found = choose(Options(time_limit_s=1.0, cache=False), predictor, budget).solution
    assert found.schedule is not None
    assert predictor.needed_bytes(found.schedule) <= budget
    directly = run_solver(find_solver("auto"), problem, int(budget / 1.05), time_limit_s=4.0)
    assert directly.schedule is not None
    extra = [simulate(problem, s).cost - base.cost for s in (found.schedule, directly.schedule)]
    assert extra[0] <= 1.15 * extra[1]
