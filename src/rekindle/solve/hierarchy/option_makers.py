"""Option makers: keep everything, TW-Remat with the greedy walk, annealing, rotor.

An option maker takes a part and the seconds it may use, and returns options (`options.Option`),
none where it does not apply (HiRemate, Sec. 3.2.1). A part is a problem of its own, so any solver
of problems can be one (`by_budget`).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rekindle import _native
from rekindle.core import Problem, keep_all, simulate
from rekindle.partition.parts import Part
from rekindle.partition.separators import find_rows
from rekindle.solve.anneal.fastsa import FastSA
from rekindle.solve.base import Solver, too_large, trivial_floor
from rekindle.solve.chains.rotor import Rotor
from rekindle.solve.hierarchy.options import Option, measure, split
from rekindle.solve.parallel import interrupted
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
            if left <= 0 or interrupted():
                break
            # While the loss runs, peak - save bytes are taken, so what is kept across it is within
            # `save`; at any other step the limit is `peak`.
            tight = with_loss_workspace(problem, peak - save)
            _, walk = _native.evict(tight.native, order, peak, 40 * len(order), left)
            tried = (walk, *self._filled(tight, peak, found.sequences, left))
            fitting = [ops for ops in tried if fits(tight, ops, peak)]
            # One schedule of each point of the grid: the level above wants options that differ in
            # what they keep, and those of one point hardly do.
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


@dataclass(frozen=True, slots=True)
class ByFastSA:
    """Annealing (`fastsa`) on the part over a grid of budgets. It may change the order of ops, as
    no other maker does. Applies to parts that are not so small that the others find all there is to
    find, nor so large that a few moves per op get nowhere."""

    num_peaks: int = 2
    num_saves: int = 4
    moves_per_op: int = 400
    min_ops: int = 12
    max_ops: int = 400

    def __call__(self, part: Part, time_limit_s: float) -> list[Option]:
        problem = part.problem
        num_ops = len(problem.ops)
        if not self.min_ops <= num_ops <= self.max_ops or too_large(problem) is not None:
            return []
        # One seed: the makers of the other parts run on the other cores.
        solver = FastSA(num_moves=self.moves_per_op * num_ops, num_seeds=1)
        return by_budget(part, solver, self.num_peaks, self.num_saves, time_limit_s)


@dataclass(frozen=True, slots=True)
class ByRotor:
    """The optimal persistent schedule (`rotor`) where the part is a chain of blocks itself."""

    num_peaks: int = 2
    num_saves: int = 5
    min_blocks: int = 4
    max_blocks: int = 60
    slots: int = 120

    def __call__(self, part: Part, time_limit_s: float) -> list[Option]:
        # A part has phases of its own around its loss op, so it can be a chain where the whole is
        # none.
        rows = find_rows(part.problem)
        if isinstance(rows, str) or len(rows) < self.min_blocks:
            return []
        solver = Rotor(slots=self.slots, max_blocks=self.max_blocks)
        return by_budget(part, solver, self.num_peaks, self.num_saves, time_limit_s)


def by_budget(
    part: Part, solver: Solver, num_peaks: int, num_saves: int, time_limit_s: float
) -> list[Option]:
    """The options that a solver's schedules for a grid of budgets are."""
    deadline = time.monotonic() + time_limit_s
    halves: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    grid = budget_grid(part, num_peaks, num_saves)
    for k, (peak, save) in enumerate(grid):
        left = deadline - time.monotonic()
        if left <= 0 or interrupted():
            break
        tight = with_loss_workspace(part.problem, peak - save)
        # What a point leaves over goes to those after it.
        share = left / (len(grid) - k)
        # Not through `run_solver`: whatever comes back, `measure` finds out what it needs.
        schedule = solver.solve(tight, peak, time_limit_s=share, seed=0).schedule
        if schedule is not None and (both := split(part, schedule.ops)) is not None:
            halves[both] = None
    return [measure(part, *both) for both in halves]


def fits(problem: Problem, ops: Sequence[int], budget: int) -> bool:
    """Whether the runs are a valid schedule within the budget."""
    # Not `simulate`, which raises: a greedy walk that gave up has no valid schedule.
    trace = _native.simulate(problem.native, list(ops))
    return trace.fault == _native.Fault.none and trace.peak <= budget


def with_loss_workspace(problem: Problem, workspace: int) -> Problem:
    """The problem with another workspace of its loss op: what else is in memory at that time."""
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
    # The part's outputs leave it, so they are there across the loss whatever the option.
    least = sum(problem.values[v].size for v in part.forward_out)
    kept = kept_by_all(part)
    # A dictionary for its order: points that coincide in small parts are solved once.
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
    # To a 128th: the grid is coarser than that.
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
