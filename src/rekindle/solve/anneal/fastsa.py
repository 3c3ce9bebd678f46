"""`fastsa` and `reorder`: simulated annealing over whole schedules.

FastSA (Imanishi et al., NeurIPS 2023, "A fast heuristic to optimize time-space tradeoff for large
models"). The state is a schedule on a line with empty slots; a move adds, removes or shifts runs;
it is kept if the objective falls, or rises by less than the temperature allows. The schedule is
valid at every moment and its memory is known exactly (`cpp/anneal/timeline.h`, section 2.2 and
B.1); ops that must run once are moved and never added or removed.

- Objectives: `area`, ours and the default: cost plus a price on the memory above the budget, summed
  over the steps; the price adapts until the budget is met, and memory just below the budget is felt
  slightly, so that the order improves where that costs nothing. `product`: equation 1. `elu`:
  footnote 2. `peak`: M(S). Or any function of (peak, cost). `_objective`.
- `smooth`: peak-based objectives see a log-add-exp over the steps (C.2).
- `grouping`: a first stage on groups of ops (`node_grouping`, Algorithm 1), then single ops.
- `moves`: `directed`, ours (`cpp/anneal/moves.h`), look where values are made and read, and move or
  recompute chains in one go; `paper`, section 2.2, add, remove and rotate at random slots.
- Several seeds from the start, then further from the best of them: `_stages`. Beyond a few
  thousand ops from a greedy schedule instead (`_Search.walk`).
- Without a number of moves of its own, the stages are repeated, each time with twice the moves,
  while that brings something and time is left (`_Search.goes_on`); as long as nothing is within the
  budget, more rounds in vain are allowed.
- `reorder` is B.2: only the order changes, no op runs twice. Before and after the annealing, a
  search over sets of ops (`cpp/search/order.h`, ours) finds and may prove the smallest peak of any
  order.

`FastSA.as_published()` has the settings of D.4. Known limits: a heuristic; it proves nothing but
that a schedule which runs every op once is optimal, and (`reorder`) that no order is within the
budget.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, keep_all
from rekindle.core.simulate import run_native
from rekindle.solve.anneal.node_grouping import Grouping, group_ops
from rekindle.solve.base import LARGEST_COSTS, best_solution, too_large
from rekindle.solve.progress import Progress, report

Objective = Literal["area", "product", "elu", "peak"] | Callable[[float, float], float]

MAX_WIDTH = 4096  # sets of ops that go on side by side in the search for an order
LARGE = 3000  # ops; beyond, there are too few moves per op to get far from keep-all
# Rounds, each with twice the moves of the one before, that bring nothing before a search is given
# up: with a schedule within the budget, and without one. NEARER: the share of what is missing by
# which a smaller peak counts.
IN_VAIN, IN_VAIN_WITHOUT, NEARER = 1, 5, 0.05
ORDER_SETS = 15_000_000  # op sets looked at by `reorder`, times ops: some tenths of a second


@dataclass(frozen=True, slots=True)
class _Stage:
    num_seeds: int
    share: float  # of all moves, for all seeds of the stage together
    time_share: float  # of the time that is left, at most
    hot: float
    cold: float
    afresh: bool  # from the first schedule, not from the best
    ratchet: bool = False


@dataclass(frozen=True, slots=True)
class FastSA:
    """Simulated annealing over sequences of runs."""

    objective: Objective = "area"
    moves: Literal["directed", "paper"] = "directed"
    grouping: bool = False
    smooth: bool = False
    num_moves: int | None = None  # in all; None: by the number of ops, in rounds that double
    num_seeds: int = 4
    num_threads: int = 1
    temperatures: tuple[float, float] | None = None  # None: as tuned; area: in mean op costs

    name: ClassVar[str] = "fastsa"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    @classmethod
    def as_published(cls, objective: Objective = "elu", smooth: bool = False) -> "FastSA":
        """20 million moves on groups at most, then 2 million on ops, temperatures of D.4."""
        return cls(
            objective=objective,
            moves="paper",
            grouping=True,
            smooth=smooth,
            num_moves=22_000_000,
            num_seeds=1,
            temperatures=(1e-3, 1e-7),
        )

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
        search = _Search(self.name, problem, budget, time_limit_s, seed, self.num_threads)
        search.offer(keep_all(problem).ops)
        if warm_start is not None:
            search.offer(warm_start.ops)
        num_moves = self.num_moves or default_moves(problem)
        # The paper's moves start from keep-all, whatever the size.
        large = len(problem.ops) > LARGE and self.moves == "directed"
        try:
            if large and not search.done:
                search.walk()
            if self.grouping and not search.done:
                self._run_groups(search, group_ops(problem), num_moves * 10 // 11)
                # D.4: ten moves on groups for each on single ops.
                num_moves //= 11
            warm = self.grouping or (warm_start is not None and search.best is not None)
            while True:
                for stage in self._stages(warm, large):
                    if not search.done and (not stage.ratchet or search.best is None):
                        self._run(search, stage, num_moves)
                if self.num_moves is not None or not search.goes_on():
                    break
                num_moves *= 2
        except KeyboardInterrupt:
            search.ended = "interrupt"
        return search.solution()

    def _stages(self, warm: bool, large: bool) -> tuple[_Stage, ...]:
        hot, cold = self.temperatures or ((50.0, 0.02) if self._by_area else (1e-3, 1e-7))
        if not self._by_area:
            if warm:  # after the groups: from their final temperature down (D.4)
                hot, cold = cold, cold * 1e-4
            return (_Stage(self.num_seeds, 1.0, 1.0, hot, cold, afresh=not warm),)
        if large:  # heat would undo the start faster than so few moves per op mend it
            return (
                _Stage(1, 1.0, 0.8, hot / 50, cold, afresh=False),
                _Stage(1, 0.25, 1.0, hot / 50, cold, afresh=False, ratchet=True),
            )
        return (
            _Stage(self.num_seeds, 0.5, 0.6, hot, 2.5 * cold, afresh=not warm),
            _Stage(1, 0.5, 0.9, hot / 10, cold, afresh=False),
            # Still nothing within the budget: then the smallest peak.
            _Stage(1, 0.25, 1.0, hot / 10, cold, afresh=False, ratchet=True),
        )

    @property
    def _by_area(self) -> bool:
        return self.objective == "area"

    def _objective(self) -> _native.Objective:
        if callable(self.objective):
            return _native.Objective.custom
        return {
            "area": _native.Objective.area,
            "product": _native.Objective.product,
            "elu": _native.Objective.elu,
            "peak": _native.Objective.peak,
        }[self.objective]

    def _run_groups(self, search: "_Search", grouping: Grouping, num_moves: int) -> None:
        """The first stage: ends when the budget is met, or after its moves."""
        if grouping.trivial:
            return
        grouped = grouping.problem
        start = list(range(len(grouped.ops)))
        hot, cold = self.temperatures or ((50.0, 0.02) if self._by_area else (1e-3, 1e-7))
        stage = _Stage(self.num_seeds, 1.0, 0.8, hot, cold, afresh=True)
        found = search.anneal(
            grouped,
            [start],
            stage,
            num_moves,
            objective=self._objective(),
            # "if the memory budget is met, the algorithm stops" (D.4)
            enough=-1 if self._by_area else LARGEST_COSTS,
            **self._native_options(grouped, search.budget),
        )
        for groups in [start, *found]:
            search.offer(grouping.expand(search.problem, groups))

    def _run(self, search: "_Search", stage: _Stage, num_moves: int) -> None:
        search.stage(
            stage,
            num_moves,
            objective=_native.Objective.area if stage.ratchet else self._objective(),
            **self._native_options(search.problem, search.budget),
        )

    def _native_options(self, problem: Problem, budget: int) -> dict[str, Any]:
        # The paper scales sizes so that the largest value is 10 and uses base 2 (C.2).
        largest = max((value.size for value in problem.values), default=0)
        return {
            "paper_moves": self.moves == "paper",
            "smooth": largest / 10 if self.smooth and largest else 0.0,
            "custom": self.objective if callable(self.objective) else None,
        }


@dataclass(frozen=True, slots=True)
class Reorder:
    """Annealing of the order alone: every op runs once."""

    num_moves: int | None = None
    num_seeds: int = 4
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
        search = _Search(self.name, problem, budget, time_limit_s, seed, self.num_threads)
        search.offer(keep_all(problem).ops)
        if warm_start is not None and max(run_native(problem, warm_start).runs, default=0) <= 1:
            search.offer(warm_start.ops)
        # Area as the objective even here: it sees all steps above the limit where the peak sees
        # one, and the ratchet lowers the limit until no order gets below it.
        stages = (
            _Stage(self.num_seeds, 0.6, 0.6, 50.0, 0.02, afresh=True, ratchet=True),
            _Stage(1, 0.4, 1.0, 5.0, 0.02, afresh=False, ratchet=True),
        )
        num_moves = self.num_moves or default_moves(problem) // 2
        try:
            search.order(min(num_moves, ORDER_SETS // max(1, len(problem.ops))))
            while True:
                for stage in stages:
                    if not search.done:
                        objective = _native.Objective.area
                        search.stage(stage, num_moves, objective=objective, reorder_only=True)
                # With a schedule within the budget there is nothing to gain: all orders cost alike.
                if self.num_moves is not None or search.best or not search.goes_on():
                    break
                num_moves *= 2
            search.order(min(num_moves, 3 * ORDER_SETS // max(1, len(problem.ops))))
        except KeyboardInterrupt:
            search.ended = "interrupt"
        return search.solution()


class _Search:
    """What one call has found so far, and the stages that look for more."""

    def __init__(
        self, name: str, problem: Problem, budget: int, limit_s: float, seed: int, num_threads: int
    ) -> None:
        self.name, self.problem, self.budget = name, problem, budget
        self.seed, self.num_threads = seed, num_threads
        self.start = time.monotonic()
        self.limit_s = limit_s
        # Every op that is not dead runs at least once.
        self.bound = sum(op.cost for op in problem.ops)
        self.best: tuple[int, int, list[int]] | None = None  # cost, peak, ops; within the budget
        self.smallest: tuple[int, int, list[int]] | None = None  # peak, cost, ops
        self.ended = ""
        self.cut = False  # some stage had no time for all of its moves
        self.proven = False  # no order without recomputation is within the budget
        self.runs = 0
        self.rounds_in_vain = 0
        self.before: tuple[int | None, int] | None = None  # best cost, smallest peak; a round ago

    def goes_on(self) -> bool:
        """Whether another round of all stages, with twice the moves, is worth its time."""
        if self.done:
            return False
        assert self.smallest is not None
        now = (self.best[0] if self.best is not None else None, self.smallest[0])
        before, self.before = self.before, now
        if before is not None:
            cost, peak = before
            if now[0] is None:
                gained = peak - now[1] > NEARER * (peak - self.budget)
            else:
                gained = cost is None or now[0] < cost
            self.rounds_in_vain = 0 if gained else self.rounds_in_vain + 1
        return self.rounds_in_vain < (IN_VAIN if self.best is not None else IN_VAIN_WITHOUT)

    @property
    def done(self) -> bool:
        if self.ended or self.proven:
            return True
        return self.best is not None and self.best[0] <= self.bound

    def offer(self, ops: Sequence[int]) -> None:
        if not ops and self.problem.ops:
            return
        trace = run_native(self.problem, Schedule(tuple(ops)))
        cost = sum(r * op.cost for r, op in zip(trace.runs, self.problem.ops, strict=True))
        if self.smallest is None or (trace.peak, cost) < self.smallest[:2]:
            self.smallest = (trace.peak, cost, list(ops))
        if trace.peak <= self.budget and (self.best is None or (cost, trace.peak) < self.best[:2]):
            self.best = (cost, trace.peak, list(ops))
            report(Progress(self.name, time.monotonic() - self.start, cost, self.bound))

    def walk(self) -> None:
        """A greedy schedule within the budget, as a start."""
        order = list(keep_all(self.problem).ops)
        limit_s = 0.3 * self.limit_s
        fits, ops = _native.evict(
            self.problem.native, order, self.budget, 8 * len(order) + 1000, limit_s
        )
        if fits:
            self.offer(ops)

    def order(self, max_sets: int) -> None:
        """The smallest peak of any order, found and perhaps proven by looking at sets of ops."""
        if self.done or self.smallest is None or len(self.problem.ops) > LARGE:
            return
        left_s = max(0.0, self.limit_s - (time.monotonic() - self.start))
        order, at_least, _, interrupted = _native.smallest_order(
            self.problem.native,
            self.smallest[2],
            budget=self.budget,
            max_width=MAX_WIDTH,
            max_sets=max_sets,
            time_limit_s=left_s / 3,
        )
        self.offer(order)
        # `at_least` is a proof if no set of ops was left out; then no order without recomputation
        # fits, which says nothing about schedules with recomputation.
        self.proven = self.best is None and at_least >= self.smallest[0] > self.budget
        if interrupted:
            self.ended = "interrupt"

    def stage(self, stage: _Stage, num_moves: int, **options: Any) -> None:
        best = (self.best or self.smallest or (0, 0, []))[2]
        start = list(keep_all(self.problem).ops) if stage.afresh else best
        for ops in self.anneal(self.problem, [start], stage, num_moves, **options):
            self.offer(ops)

    def anneal(
        self,
        problem: Problem,
        starts: list[list[int]],
        stage: _Stage,
        num_moves: int,
        *,
        enough: int | None = None,
        **options: Any,
    ) -> list[list[int]]:
        # Every stage has seeds of its own, so that two stages from one start do not walk alike.
        first = self.seed * 100_000 + self.runs
        self.runs += stage.num_seeds
        left_s = max(0.0, self.limit_s - (time.monotonic() - self.start))
        results, ended = _native.anneal(
            problem.native,
            starts,
            self.budget,
            seeds=[first + k for k in range(stage.num_seeds)],
            max_moves=max(1, int(num_moves * stage.share / stage.num_seeds)),
            time_limit_s=left_s * stage.time_share,
            num_threads=self.num_threads,
            hot=stage.hot,
            cold=stage.cold,
            ratchet=stage.ratchet,
            enough=self.bound if enough is None else enough,
            **options,
        )
        # Noted, since only then does the answer depend on the machine: under a limit on moves
        # alone the same seed gives the same schedule.
        self.cut = self.cut or ended == "time limit"
        if ended == "interrupt":
            self.ended = ended
        elif time.monotonic() - self.start >= self.limit_s:
            self.ended = "time limit"
        return [r.best if r.within else r.smallest for r in results]

    def solution(self) -> Solution:
        found = [entry[2] for entry in (self.best, self.smallest) if entry is not None]
        return best_solution(
            self.problem,
            self.budget,
            found,
            solver=self.name,
            bound=self.bound,
            stopped_by=self._stopped_by(),
            proven_infeasible=self.proven,
            space="orders without recomputation",
        )

    def _stopped_by(self) -> str:
        if self.ended:
            return self.ended
        if self.done:
            return "proof"
        return "time limit" if self.cut else "move limit"


def default_moves(problem: Problem) -> int:
    """Enough for the published instances to settle; seconds up to a few thousand ops."""
    num_ops = len(problem.ops)
    return max(200_000, min(20_000 * num_ops, 6_000_000), 1_500 * num_ops)
