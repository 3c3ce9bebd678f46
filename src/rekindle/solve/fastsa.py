"""`fastsa` and `reorder`: simulated annealing over whole schedules.

FastSA (Imanishi et al., NeurIPS 2023, "A fast heuristic to optimize time-space tradeoff for large
models"). The state is a schedule on a line with empty slots; a move adds, removes or shifts runs;
it is kept if the objective falls, or rises by less than the temperature likes. The schedule is
valid at every moment, and its memory is known exactly (`cpp/anneal_timeline.cpp`).

- Objectives: `area`, ours and the default (cost plus a price on the memory above the budget, summed
  over the steps; the price adapts until the budget is met; memory just below the budget is felt
  slightly, so that the order of ops improves where it costs nothing); `product`, equation 1;
  `elu`, footnote 2; `peak`, M(S) alone; or a function of (peak, cost). `_objective`.
- `reorder` is B.2: only the order changes, no op runs twice.

What is ours and not the paper's: moves that look where values are made and read instead of random
slots, chains of ops moved or recomputed in one move, the area objective.

Known limits: a heuristic; it proves nothing (a schedule that runs every op once is optimal by
inspection) and "infeasible" means that nothing was found.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.solve.base import answer, trivial_floor
from rekindle.solve.progress import Progress, report

Objective = Literal["area", "product", "elu", "peak"] | Callable[[float, float], float]

LARGEST_SIZES = 2**60  # sums stay exact in 64 signed bits, whatever is alive twice
LARGEST_COSTS = 2**56


@dataclass(frozen=True, slots=True)
class FastSA:
    objective: Objective = "area"
    max_moves: int = 4_000_000  # per seed; with the same seed it gives the same schedule
    num_seeds: int = 1
    num_threads: int = 1
    hot: float = 10.0  # temperatures in mean op costs
    cold: float = 0.02

    name: ClassVar[str] = "fastsa"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return too_large(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        bound = sum(op.cost for op in problem.ops)
        start = warm_start or keep_all(problem)
        results, ended = _native.anneal(
            problem.native,
            [list(start.ops)],
            budget,
            _native.Objective.area,
            seeds=[seed * 1000 + k for k in range(self.num_seeds)],
            max_moves=self.max_moves,
            time_limit_s=time_limit_s,
            num_threads=self.num_threads,
            hot=self.hot,
            cold=self.cold,
            enough=bound,
        )
        found: list[Sequence[int]] = [start.ops, keep_all(problem).ops]
        for result in results:
            found.append(result.best if result.within else result.smallest)
        return answer(
            problem,
            budget,
            found,
            solver=self.name,
            bound=bound,
            stopped_by=ended or "move limit",
        )


@dataclass(frozen=True, slots=True)
class Reorder:
    max_moves: int = 2_000_000
    num_seeds: int = 1
    num_threads: int = 1

    name: ClassVar[str] = "reorder"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return too_large(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        bound = sum(op.cost for op in problem.ops)
        start = keep_all(problem)
        if warm_start is not None and len(warm_start) == len(problem.ops):
            start = warm_start
        results, ended = _native.anneal(
            problem.native,
            [list(start.ops)],
            budget,
            _native.Objective.area,
            seeds=[seed * 1000 + k for k in range(self.num_seeds)],
            max_moves=self.max_moves,
            time_limit_s=time_limit_s,
            num_threads=self.num_threads,
            reorder_only=True,
            ratchet=True,
            enough=bound,
        )
        found: list[Sequence[int]] = [start.ops, keep_all(problem).ops]
        for result in results:
            found.append(result.best if result.within else result.smallest)
        return answer(
            problem,
            budget,
            found,
            solver=self.name,
            bound=bound,
            stopped_by=ended or "move limit",
        )


def too_large(problem: Problem) -> str | None:
    """Sums beyond 64 signed bits would not be exact."""
    total = sum(value.size for value in problem.values) + sum(op.workspace for op in problem.ops)
    if total >= LARGEST_SIZES:
        return f"its sizes sum to {total}, and sums are exact up to 2^60; use a larger size unit"
    cost = sum(op.cost for op in problem.ops)
    if cost >= LARGEST_COSTS:
        return f"its costs sum to {cost}, and sums are exact up to 2^56; use a larger cost unit"
    return None


__all__ = ["FastSA", "Reorder", "Progress", "report", "time", "simulate", "trivial_floor"]
