"""Option makers that work on any part: keep everything, the greedy walk, TW-Remat.

An option maker takes a part and the seconds it may use, and returns options (`options.Option`).
Any solver of problems can be one: a part is a problem of its own.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rekindle import _native
from rekindle.core import Problem, keep_all, simulate
from rekindle.partition.repeated import Part
from rekindle.solve.base import trivial_floor
from rekindle.solve.options import Option, measure, split
from rekindle.solve.twremat import recomputing_sequences


def keep_everything(part: Part, time_limit_s: float) -> list[Option]:
    """Each op once, in the listed order."""
    loss = part.problem.loss_op
    assert loss is not None
    return [measure(part, range(loss), range(loss + 1, len(part.problem.ops)))]


@dataclass(frozen=True, slots=True)
class ByTWRemat:
    """TW-Remat, and the greedy walk, on the part over a grid of budgets. The loss op's workspace
    stands for the difference between the two budgets, so that what is kept across the loss is
    within the second."""

    num_peaks: int = 3
    num_saves: int = 6
    limits: tuple[float, ...] = (1.0, 0.95, 0.85)  # of the budget
    max_length: int = 20_000
    max_width: int = 40

    def __call__(self, part: Part, time_limit_s: float) -> list[Option]:
        problem = part.problem
        deadline = time.monotonic() + time_limit_s
        order = list(range(len(problem.ops)))
        costs = [op.cost for op in problem.ops]
        found = recomputing_sequences(problem, self.max_length, self.max_width, deadline)
        halves: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
        for peak, save in budget_grid(part, self.num_peaks, self.num_saves):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            tight = with_loss_workspace(problem, peak - save)
            _, walk = _native.evict(tight.native, order, peak, 40 * len(order), left)
            tried = (walk, *self._filled(tight, peak, found.sequences, left))
            fitting = [ops for ops in tried if fits(tight, ops, peak)]
            best = min(fitting, key=lambda ops: sum(costs[i] for i in ops), default=None)
            if best is not None and (both := split(part, best)) is not None:
                halves[both] = None
        return [measure(part, *both) for both in halves]

    def _filled(
        self, problem: Problem, budget: int, sequences: Sequence[list[int]], time_limit_s: float
    ) -> Iterator[list[int]]:
        for sequence in sequences:
            for keep in (_native.Keep.chain_per_byte_time, _native.Keep.chain_per_byte):
                for share in self.limits:
                    limit = int(budget * share)
                    yield _native.fill_up(problem.native, sequence, limit, keep, 6, time_limit_s)


def fits(problem: Problem, ops: Sequence[int], budget: int) -> bool:
    """Whether the runs are a valid schedule within the budget."""
    trace = _native.simulate(problem.native, list(ops))
    return trace.fault == _native.Fault.none and trace.peak <= budget


def with_loss_workspace(problem: Problem, workspace: int) -> Problem:
    loss = problem.loss_op
    assert loss is not None
    ops = list(problem.ops)
    ops[loss] = replace(ops[loss], workspace=workspace)
    return replace(problem, ops=tuple(ops))


def budget_grid(part: Part, num_peaks: int, num_saves: int) -> list[tuple[int, int]]:
    """(M_peak, M_save): peaks evenly from the least any schedule needs to what keep-all needs,
    saves evenly from the part's outputs to the peak (Rockmate 3.3)."""
    problem = part.problem
    highest = simulate(problem, keep_all(problem)).peak
    lowest = _walk_floor(problem, highest)
    least = sum(problem.values[v].size for v in part.forward_out)
    kept = kept_by_all(part)
    grid: dict[tuple[int, int], None] = {}
    for a in range(num_peaks):
        peak = highest - (highest - lowest) * a // max(1, num_peaks - 1)
        most = min(peak, kept)
        for b in range(num_saves):
            save = most - (most - min(least, most)) * b // max(1, num_saves - 1)
            grid[peak, save] = None
    return list(grid)


def _walk_floor(problem: Problem, high: int) -> int:
    """About the smallest peak that the greedy walk reaches."""
    order = list(range(len(problem.ops)))
    low = min(trivial_floor(problem), high)
    while high - low > max(1, high >> 7):
        middle = (low + high) // 2
        walk_fits, _ = _native.evict(problem.native, order, middle, 40 * len(order), 1.0)
        low, high = (low, middle) if walk_fits else (middle + 1, high)
    return high


def kept_by_all(part: Part) -> int:
    """What is there at the loss when nothing is run twice."""
    problem = part.problem
    loss = problem.loss_op
    assert loss is not None
    return simulate(problem, keep_all(problem)).memory[loss]
