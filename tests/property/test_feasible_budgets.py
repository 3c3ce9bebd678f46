"""A budget that is known to be feasible is never refused, whatever the allocator makes of it.

The allocator of these tests is worse than any real one: how much more it needs than a schedule's
simulated peak has nothing to do with that peak, so that a search for less memory often ends with a
schedule that needs more.
"""

import dataclasses
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from rekindle.core import Problem, Schedule, Solution, Status, keep_all, simulate
from rekindle.core.generate import chain, random_problem, transformer
from rekindle.errors import BudgetInfeasible
from rekindle.plans.options import Options
from rekindle.solve.auto.auto import Auto
from rekindle.solving import choose

QUICK = Auto(max_rounds=2, effort=0.02, threads=1)


@dataclass(frozen=True)
class Erratic:
    """Needs up to 12 % more than was asked for, by a hash of the schedule."""

    problem: Problem
    seed: int
    outputs_are: ClassVar[str] = "the gradients"

    @property
    def keep_all_bytes(self) -> int:
        return self.needed_bytes(keep_all(self.problem))

    def needed_bytes(self, schedule: Schedule) -> int:
        peak = simulate(self.problem, schedule).peak
        drawn = zlib.crc32(repr((self.seed, schedule.ops)).encode()) % 1000
        return peak + peak * 12 * drawn // 100_000


def problem_of(seed: int) -> Problem:
    made = (chain(12), transformer(3, batch=2, sequence=32, width=32, vocabulary=64))
    problem = made[seed % 3] if seed % 3 < 2 else random_problem(seed, num_ops=20)
    return dataclasses.replace(problem, name=f"feasible {seed}")


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_e16_a_budget_above_a_feasible_one_is_feasible(
    seed: int, on_disk: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path))
    predictor: Any = Erratic(problem_of(seed), seed)
    options = Options(solver=QUICK, time_limit_s=0.2, seed=seed, cache=on_disk)

    def needs(budget: int) -> int:
        """What the schedule that is chosen needs."""
        if on_disk:  # as another process would
            monkeypatch.setattr("rekindle.solve.small_schedules._known", OrderedDict())
        choice = choose(options, predictor, budget)
        assert choice.budget_bytes == budget
        return predictor.needed_bytes(choice.solution.schedule)

    whole = predictor.keep_all_bytes
    smallest = whole
    for percent in (95, 40, 70, 62, 45):
        budget = whole * percent // 100
        try:
            least = needs(budget)
        except BudgetInfeasible as refusal:
            assert budget < smallest, "refused, and a smaller one was found feasible"
            least = refusal.smallest_peak_bytes
            assert needs(least) <= least
        smallest = min(smallest, least)
    assert needs(smallest) <= smallest
    assert needs(smallest + 1) <= smallest + 1


@dataclass(frozen=True)
class Unlucky:
    """Finds nothing, ever, as under load."""

    name: ClassVar[str] = "unlucky"
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
        return Solution(status=Status.TIME_LIMIT, schedule=None, solver=self.name)


def test_e16_what_one_search_has_found_another_has_too() -> None:
    problem = dataclasses.replace(transformer(4), name="unlucky")
    predictor: Any = Erratic(problem, 0)
    budget = predictor.keep_all_bytes // 2
    found = choose(Options(time_limit_s=2.0, cache=False), predictor, budget)
    again = choose(Options(solver=Unlucky(), time_limit_s=0.1, cache=False), predictor, budget)
    assert again.solution.schedule is not None
    assert predictor.needed_bytes(again.solution.schedule) <= budget
    # Costs that were measured anew change nothing about memory.
    ops = tuple(dataclasses.replace(op, cost=op.cost + 1) for op in problem.ops)
    other: Any = Erratic(dataclasses.replace(problem, ops=ops), 0)
    assert choose(Options(solver=Unlucky(), time_limit_s=0.1, cache=False), other, budget)
    assert found.budget_bytes == budget
