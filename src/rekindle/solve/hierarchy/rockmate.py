"""`rockmate`: Checkmate inside blocks, Rotor over the chain of blocks (Zhao et al., ICML 2023).

1. The forward graph is cut at its 1-separators (`partition.separators`).
2. Each distinct block (`partition.parts`) gets options from rk-Checkmate over a grid of budgets
   (M_peak, M_save): 20 x 20, M_peak evenly from the least that is needed to what keep-all needs,
   M_save evenly from the block's outputs to M_peak (Sec. 3.3). `ByCheckmate` leaves out the points
   whose answer follows from another one's: a schedule found for (p, s) that needs only (p', s') is
   the best for everything in between, and below an infeasible point all is infeasible.
3. rk-Rotor (App. C, with Opt(s + 1, ...) in Eq. 1) over the blocks with all their options, in C++
   (`chain_search.solve_on_chain`): its sequence is lowered to op ids, dead and needless runs are
   dropped, and the simulator decides.

Known limits: a graph that is no chain is refused; a block too large for Checkmate in its share of
the time has the options of the greedy walk and of TW-Remat only; within a repeated forward nothing
is kept (Sec. 3.4).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from rekindle.core import Problem, Schedule, Solution, Status, keep_all, simulate
from rekindle.partition.chain import Chain, Measure
from rekindle.partition.chain import Option as ChainOption
from rekindle.partition.parts import Form, Part, cut_ops
from rekindle.partition.separators import Rows, find_rows
from rekindle.solve.base import best_solution
from rekindle.solve.chains.chain_dp import Rule
from rekindle.solve.chains.chain_search import solve_on_chain
from rekindle.solve.hierarchy.option_makers import ByTWRemat, budget_grid
from rekindle.solve.hierarchy.options import Option, OptionMaker, measure, pareto, split
from rekindle.solve.parallel import num_cores, run_all
from rekindle.solve.staged.checkmate import cheapest_staged


@dataclass(frozen=True, slots=True)
class ByCheckmate:
    """rk-Checkmate on the part over a grid of budgets."""

    # As in the paper (Sec. 3.3); many of the 400 points are covered by others (`_Known`).
    num_peaks: int = 20
    num_saves: int = 20
    max_ops: int = 80  # a larger part is left to other makers
    time_per_program_s: float = 2.0

    def __call__(self, part: Part, time_limit_s: float) -> list[Option]:
        problem = part.problem
        # The program has (ops)^2 runs: beyond this most points would end at their time limit.
        if len(problem.ops) > self.max_ops:
            return []
        deadline = time.monotonic() + time_limit_s
        known = _Known()
        options: list[Option] = []
        for peak, save in budget_grid(part, self.num_peaks, self.num_saves):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            if known.covers(peak, save):
                continue
            result = cheapest_staged(
                problem,
                peak,
                save_budget=save,
                time_limit_s=min(left, self.time_per_program_s),
            )
            if result.stopped_by == "interrupt":
                raise KeyboardInterrupt
            # A proof over the staged space, which is that of the paper.
            if result.infeasible:
                known.infeasible.append((peak, save))
            if result.schedule is None:
                continue
            halves = split(part, result.schedule.ops)
            if halves is not None:
                options.append(measure(part, *halves))
                # Only an optimum answers for other budgets: of what a time limit ended nothing
                # follows.
                if result.optimal:
                    known.solved.append((peak, save, *_needs(problem, result.schedule)))
        return options


def _needs(problem: Problem, schedule: Schedule) -> tuple[int, int]:
    """The peak of a part's schedule, and what it keeps across the loss."""
    trace = simulate(problem, schedule)
    loss = problem.loss_op
    assert loss is not None
    # With the workspace and the outputs of the part's loss, which are 0.
    at = schedule.ops.index(loss)
    return trace.peak, trace.memory[at]


@dataclass(slots=True)
class _Known:
    """Budgets whose answer is known without solving."""

    solved: list[tuple[int, int, int, int]] = field(default_factory=list)
    infeasible: list[tuple[int, int]] = field(default_factory=list)

    def covers(self, peak: int, save: int) -> bool:
        # Less of both cannot become feasible.
        if any(peak <= p and save <= s for p, s in self.infeasible):
            return True
        return any(
            need_p <= peak <= p and need_s <= save <= s for p, s, need_p, need_s in self.solved
        )


@dataclass(frozen=True, slots=True)
class Rockmate:
    """Blocks solved on their own, and a chain program over their options."""

    makers: tuple[OptionMaker, ...] = (ByTWRemat(), ByCheckmate())
    slots: int = 500
    max_blocks: int = 400
    threads: int = 0  # 0: all cores

    name: ClassVar[str] = "rockmate"
    requires: ClassVar[tuple[str, ...]] = ("highspy",)
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        rows = find_rows(problem)
        return rows if isinstance(rows, str) else None

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        start = time.monotonic()
        deadline = start + time_limit_s
        found: list[Sequence[int]] = [keep_all(problem).ops]
        if warm_start is not None:
            found.append(warm_start.ops)
        try:
            # Beyond `max_blocks` neighbours are joined: larger blocks, fewer sums.
            rows = find_rows(problem, self.max_blocks)
            assert not isinstance(rows, str), "accepts was asked first"
            blocks = Blocks(problem, rows)
            # Blocks that save all come first, so that there is something to return.
            for ends in (start + 0.15 * time_limit_s, deadline):
                solution = solve_on_chain(
                    problem,
                    blocks.chain(),
                    budget,
                    Rule.persistent,
                    name=self.name,
                    slots=self.slots,
                    prune=True,
                    deadline=ends,
                    found=found,
                )
                if solution.status is Status.OPTIMAL or solution.stopped_by == "interrupt":
                    break
                found += [s.ops for s in (solution.schedule, solution.smallest) if s is not None]
                # Options take the largest part of the time, and the chain program after them the
                # rest.
                if ends < deadline:
                    ready = deadline - 0.3 * time_limit_s
                    blocks.make_options(self.makers, ready, self.threads or num_cores())
        except KeyboardInterrupt:
            return best_solution(problem, budget, found, solver=self.name, stopped_by="interrupt")
        return solution


class Blocks:
    """The blocks of a chain as parts; options are made once for each distinct one."""

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem = problem
        self.rows = rows
        self.parts = [
            cut_ops(problem, sorted(forward), sorted(backward))
            for forward, backward in zip(rows.forward, rows.backward, strict=True)
        ]
        self.options: dict[Form, list[Option]] = {}

    @property
    def num_distinct(self) -> int:
        return len({part.form for part in self.parts})

    def make_options(
        self, makers: Sequence[OptionMaker], deadline: float, num_workers: int = 1
    ) -> None:
        """Options for each distinct block, in parallel, each with its share of the time left."""
        # Blocks that are alike (the layers of a transformer) share their options: this is what
        # makes Checkmate inside blocks affordable.
        forms = {part.form: part for part in self.parts}
        waiting = len(forms)

        def make(part: Part) -> list[Option]:
            nonlocal waiting
            # `waiting` changes in several threads, without a lock: a share that is a little off
            # does no harm.
            rounds = -(-waiting // num_workers)
            waiting -= 1
            found: list[Option] = []
            for maker in makers:
                left = max(0.0, deadline - time.monotonic())
                found += maker(part, left / rounds)
            return pareto(found)

        made = run_all([partial(make, part) for part in forms.values()], num_workers)
        self.options.update(zip(forms, made, strict=True))

    def chain(self) -> Chain:
        measure_block = Measure(self.problem, self.rows)
        more: dict[int, list[ChainOption]] = {}
        last = len(self.parts) - 1
        loss = () if self.problem.loss_op is None else (self.problem.loss_op,)
        for k, part in enumerate(self.parts):
            for option in self.options.get(part.form, ()):
                forward = [part.ops[i] for i in option.forward]
                backward = [part.ops[i] for i in option.backward]
                # The last block has the loss in its middle, not between its forward and its
                # backward.
                if k == last:
                    made = measure_block.last_option(forward, (*loss, *backward))
                else:
                    made = measure_block.option(k, forward, backward)
                more.setdefault(k, []).append(made)
        return measure_block.chain(more)
