"""`auto`, the default: methods that work on one incumbent, with a proven lower bound beside it.

In this order, each step only where the one before left something to gain:

1. keep-all, where it fits: nothing can cost less (every op that is not dead runs at least once).
2. Small problems (some 25 values, sometimes 60): the optimum over all schedules, by A* over what
   is in memory (`_solve_exactly`, `cpp/search/exact.cpp`); with more states once there is a
   schedule to beat.
3. A lower bound (`cpp/bound/bound.h`): at the moment an op first runs, every other op has run or
   will, and what is still to be read is in memory or is recomputed; the cheapest choice under the
   budget is a minimum cut for each price of memory. Valid for every order, milliseconds for
   thousands of ops. `_prove_bound`; `lower_bound.best_bound` picks the moments.
4. A climb over eviction policies (`Incumbent.policies`, `cpp/search/policies.cpp`): a greedy walk
   decodes a handful of weights, shared by alike values, into a schedule. Fast at any size.
5. A climb over save sets (`_search_save_sets`, `cpp/search/save_sets.cpp`): prices of memory,
   decoded by the same minimum cut into what is kept across the loss, and that into a schedule;
   where the loss leaves little room, places to begin again from. In a training step most of the
   choice is made there. Where neither finds a schedule: both for a larger budget,
   and from there down in steps (`_descend`). Where gradients alone do not fit, both begin from an
   order that needs less for them (`start_order`), the save sets are sought where gradients leave
   the least room, and several of them are annealed side by side, taking parts of each other
   (`cpp/search/lns.cpp`).
6. Rounds on all cores (`_improve`), longer and longer, one that gained once more, until the bound
   is met, a full turn of them brings nothing, or time is up: annealing (`cpp/anneal/anneal.cpp`)
   over the whole sequence, order and recomputations together, from the incumbent when cold, from
   the plain order when hot and on from the best of these in steps; and large neighbourhoods: the
   recomputations of a part of the schedule are taken out and put back otherwise
   (`cpp/search/lns.cpp`), or one stretch after another is heated (`cpp/anneal/windows.h`).
7. Where a gap is left that is not small, a bound over several moments, in whole numbers
   (`_tighten`, `moment_chain`).

Known limits: where memory is short at many moments, the gap that the bound leaves is not all
real. Beyond some ten thousand ops the annealer only
polishes.
"""

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.solve.auto.incumbent import Incumbent
from rekindle.solve.auto.rounds import (
    AFRESH,
    AFTER_SAVE_SETS,
    COLD,
    FROM_NOTHING,
    MANY_WINDOWS,
    REPAIR,
    SQUEEZE,
    TIGHT,
    Round,
)
from rekindle.solve.base import best_solution, too_large, trivial_floor
from rekindle.solve.lower_bound import best_moment
from rekindle.solve.min_budget import small_peaks
from rekindle.solve.moment_chain import chain_bound


@dataclass(frozen=True, slots=True)
class Auto:
    """The default solver: a bound and several searches that share one incumbent."""

    max_rounds: int = 36
    effort: float = 1.0  # scales the tries and moves of each step
    gap: float = 1e-3  # of the keep-all cost: closer to the bound than this is good enough
    threads: int = 0  # 0: all cores

    name: ClassVar[str] = "auto"
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
        search = _Search(problem, budget, time.monotonic() + time_limit_s, seed, self)
        try:
            search.run(warm_start)
        except KeyboardInterrupt:
            search.stopped_by = "interrupt"
        return search.solution()


@dataclass
class _Search(Incumbent):
    """One run: what is done, in which order and for how long."""

    options: Auto

    def run(self, warm_start: Schedule | None) -> None:
        problem = self.problem
        self.bound = self.base_cost
        self.offer(keep_all(problem).ops, "keep-all")
        if warm_start is not None:
            self.offer(warm_start.ops, "warm start")
        before = self.best
        if self.done:
            self.stopped_by = self._end_of_search
            return
        if self.budget < trivial_floor(problem):
            self.infeasible = True
            self.stopped_by = "proof"
            self._minimize_peak()
            return
        if self._solve_exactly(QUICK_STATES):
            return
        self._prove_bound()
        if warm_start is not None and before is None and not self.infeasible:
            self._repair(warm_start)
        self.policies()
        self._search_save_sets()
        if not self.done and self._solve_exactly(MOST_STATES):
            return
        if self.best is None and not self.infeasible and problem.loss_op is not None:
            self._descend()
        reserved = CHAIN_SHARE * self.left_s if self._wants_tightening else 0.0
        self.deadline -= reserved
        self._improve()
        self.deadline += reserved
        self._tighten()
        if self.best is None:
            self._minimize_peak()
        if self.done:
            self.stopped_by = self._end_of_search
        elif not self.stopped_by:
            self.stopped_by = "time limit" if self.left_s <= 0 else "no improvement"

    @property
    def _end_of_search(self) -> str:
        """Why a search that is done needs no more time."""
        proven = self.infeasible or (self.best is not None and self.best[0] <= self.bound)
        return "proof" if proven else "gap"

    def _solve_exactly(self, max_states: int) -> bool:
        """True if so many states are enough for the optimum, or a proof that nothing fits."""
        finished, feasible, ops = _native.solve_exact(
            self.problem.native, self.budget, self.left_s / 4,
            below=self.best[0] if self.best is not None else -1,
            max_states=int(max_states * min(1.0, 6 * self.options.effort)),
        )  # fmt: skip
        if not finished:
            return False
        if feasible:
            self.offer(ops, "exact")
        if self.best is not None:
            self.bound = self.best[0]
        else:
            self.infeasible = True
            self._minimize_peak()
        self.stopped_by = "proof"
        return True

    def _prove_bound(self) -> None:
        share = min(BOUND_S, 0.1 * self.left_s)
        extra, infeasible, self.moment = best_moment(self.problem, self.budget, share)
        self.infeasible = infeasible
        self.bound = self.base_cost + extra

    @property
    def _wants_tightening(self) -> bool:
        """Programs over several moments take seconds, so only where the gap is large, and not in a
        search that was asked to be short."""
        if self.best is None or self.infeasible or self.options.effort < CHAIN_EFFORT:
            return False
        gap = max(CHAIN_GAP, self.options.gap) * self.base_cost
        return self.moment is not None and self.best[0] - self.bound > gap

    def _tighten(self) -> None:
        """Proves more, by programs over more and more moments."""
        if not self._wants_tightening or self.stopped_by == "interrupt":
            return
        assert self.best is not None
        assert self.moment is not None
        elapsed_s = time.monotonic() - self.start
        share = min(self.left_s, CHAIN_S, 0.1 * (self.deadline - self.start) + 0.3 * elapsed_s)
        enough = self.best[0] - self.base_cost
        found = chain_bound(self.problem, self.budget, self.moment, share, enough)
        if found.schedule is not None:
            self.offer(found.schedule.ops, "bound")
        self.bound = max(self.bound, self.base_cost + found.extra)
        if found.interrupted:
            raise KeyboardInterrupt

    def _repair(self, schedule: Schedule) -> None:
        """A schedule above the budget, as it was for a larger one: annealing brings it below, which
        costs little where little is missing, and takes less time than to begin again."""
        starts = [list(schedule.ops)] * self.threads
        moves = max(1000, int(self.options.effort * 2000 * len(self.problem.ops)))
        self.anneal(starts, REPAIR, REPAIR.hot, self.seed * 10_000, moves, 0.3 * self.left_s)

    def _search_save_sets(self) -> None:
        problem = self.problem
        if self.done:
            return
        moment, share = problem.loss_op, 0.25
        if self.best is None:  # where the greedy walk finds nothing, neither does this, mostly
            share = 0.05
        if moment is None:  # no moment splits the problem as the loss does: a short look
            share = 0.02 if self.for_annealing else 0.05
            memory = simulate(problem, keep_all(problem)).memory
            moment = max(range(len(memory)), key=memory.__getitem__)
        if self.order.tightest is not None:
            self._search_gradient_save_sets(self.order.tightest)
            share = 0.02 if self.best is not None else 0.1
        self.save_sets(moment, self.threads, 3000, share * self.left_s)

    def _search_gradient_save_sets(self, moment: int) -> None:
        """Gradients have to be recomputed as well: which ones, and from what, is decided where they
        leave the least room. Several searches, since one alone may end far above another; what they
        find is rebuilt, then annealed for some generations, each with parts of the others."""
        found = self.save_sets(moment, 2 * self.threads, 100, 0.2 * self.left_s)
        if not found:
            return
        effort = self.options.effort
        found = self.lns(found, 90, 1 + int(150 * effort), self.left_s / 4)
        tries = 1 + int(effort * TRIES_OF_A_GENERATION / len(self.problem.ops))
        for k in range(GENERATIONS):
            begun = time.monotonic()
            found = self.lns(found, 91 + k, tries, self.left_s, hot=0.003)
            if time.monotonic() - begun > self.left_s:
                return

    def _descend(self) -> None:
        """The budget is so small that the searches above find nothing: from a larger one, for which
        they do, down in steps. A schedule for a little more memory is mended at little cost."""
        for times in LARGER:
            if self.left_s <= 0.05:
                return
            budget = int(times * self.budget)
            deadline = time.monotonic() + 0.5 * self.left_s
            larger = _Search(self.problem, budget, deadline, self.seed, self.options, quiet=True)
            larger.bound = larger.base_cost
            larger.policies()
            if larger.best is not None:
                break
        else:
            return
        larger._search_save_sets()
        schedule = larger.best[2]
        most = max(1000, int(self.options.effort * 300 * len(self.problem.ops)))
        rate = 2e5  # moves of a thread in a second; measured as we go
        for step in range(1, STEPS_DOWN + 1):
            if self.left_s <= 0.05:
                return
            limit = budget * (self.budget / budget) ** (step / STEPS_DOWN)
            kind = replace(REPAIR, limit=limit / self.budget)
            share = 0.8 * self.left_s / (STEPS_DOWN + 1 - step)
            begun = time.monotonic()
            found = self.anneal(
                [list(schedule.ops)] * self.threads, kind, kind.hot,
                self.seed * 10_000 + 20 * step, min(most, max(1000, int(rate * share))), share,
            )  # fmt: skip
            rate = found[0].moves / max(1e-3, time.monotonic() - begun)
            best = min(found, key=lambda r: r.best_cost if r.within else r.smallest_peak << 64)
            schedule = Schedule(tuple(best.best or best.smallest))

    def _improve(self) -> None:
        """Rounds of improvement, longer and longer, until the bound is met, a full turn of them
        brings nothing, or time is up."""
        num_ops = len(self.problem.ops)
        # Small problems are full of traps and cheap to try: more seeds.
        num_seeds = self.threads * (4 if num_ops <= 150 else 2 if num_ops <= 500 else 1)
        moves = max(1000, int(self.options.effort * max(60_000, 2000 * num_ops)))
        rate = 2e5 * self.threads  # moves a second; measured as we go
        stalled = 0
        # Without a loss op nothing before this was made for the problem: annealing begins afresh.
        rounds = AFTER_SAVE_SETS if self.problem.loss_op is not None else FROM_NOTHING
        if self.order.tightest is not None:
            rounds, moves = TIGHT, moves // 2
        turn = 0  # of the rounds
        for round_ in range(self.options.max_rounds):
            if self.done or self.left_s <= 0.05:
                return
            if stalled >= (len(rounds) if self.best is not None else MOST_IN_VAIN):
                return
            kind = rounds[turn % len(rounds)]
            if self.best is None:
                kind = SQUEEZE if round_ % 2 else AFRESH
            if rate * self.left_s < 1.1 * moves * num_seeds:  # the last takes all that is left
                moves = max(1000, int(0.95 * rate * self.left_s / num_seeds))
                if self.best is not None and not kind.lns:
                    kind = COLD if self.problem.loss_op is not None else MANY_WINDOWS
            before = self.best[0] if self.best is not None else None
            peak_before = self.smallest[0] if self.smallest is not None else 0
            if kind.lns:
                assert self.best is not None
                starts = [list(self.best[2].ops)]
                self.lns(starts, round_, moves // MOVES_OF_A_TRY, 0.5 * self.left_s)
            else:
                seeds, length = num_seeds, moves
                if kind.long:
                    fits = int(0.95 * rate * self.left_s / self.threads)
                    seeds = self.threads
                    length = max(1000, min(fits, moves if num_seeds == seeds else LONGER * moves))
                spent, made = self._anneal_round(kind, round_, seeds, length)
                rate = max(1e4, made / max(1e-3, spent))
            gain = 0.0  # of the keep-all cost
            if self.best is not None:
                gain = 1.0 if before is None else (before - self.best[0]) / max(1, self.base_cost)
            elif self.smallest is not None:
                nearer = peak_before - self.smallest[0]
                if nearer > NEARER * (peak_before - self.budget):
                    stalled = -1
            stalled = 0 if gain > 0.1 * self.options.gap else stalled + 1
            # From nothing any annealing gains; the stretches that follow gain more.
            if gain > WORTH_REPEATING and not (kind.afresh and rounds is FROM_NOTHING):
                continue
            turn += 1
            if self.best is None or turn % len(rounds) == 0:
                moves *= 2

    def _anneal_round(
        self, kind: Round, round_: int, num_seeds: int, moves: int
    ) -> tuple[float, int]:
        """One round of annealing; the seconds it took and the moves it made."""
        plain = list(keep_all(self.problem).ops)
        incumbent = list(self.best[2].ops) if self.best is not None else plain
        begun = time.monotonic()
        first_seed = self.seed * 10_000 + 100 * (round_ + 1)
        if not kind.multistart:
            starts = [plain if kind.afresh and k % 2 == 0 else incumbent for k in range(num_seeds)]
            found = self.anneal(starts, kind, kind.hot, first_seed, moves, self.left_s)
            return time.monotonic() - begun, sum(r.moves for r in found)
        # Several short ones from nothing, then on from the best of these, incumbent or not.
        starts = [plain] * 2 * num_seeds
        share = 0.5 * self.left_s
        found = self.anneal(starts, kind, kind.hot, first_seed, moves // 4, share)
        found.sort(key=lambda r: (not r.within, r.best_cost if r.within else r.smallest_peak))
        starts = [list(r.best or r.smallest) for r in found[:num_seeds]]
        made = sum(r.moves for r in found)
        for k, hot in enumerate((2.0, 0.3)):
            share = self.left_s / (2 - k)
            found = self.anneal(starts, kind, hot, first_seed + 40 + 20 * k, moves // 2, share)
            starts = [list(r.best or r.smallest) for r in found]
            made += sum(r.moves for r in found)
        return time.monotonic() - begun, made

    def _minimize_peak(self) -> None:
        """No schedule fits: find the smallest peak, so that the answer has a number."""
        share = min(SMALLEST_PEAK_S, self.left_s)
        for ops in small_peaks(self.problem, self.seed, share):
            self.offer(ops, "smallest peak")

    def solution(self) -> Solution:
        candidates = [entry[2].ops for entry in (self.best, self.smallest) if entry is not None]
        notes = tuple(f"{method}: cost {cost}" for method, (cost, _) in self.credits.items())
        return best_solution(
            self.problem,
            self.budget,
            candidates,
            solver=Auto.name,
            bound=self.bound or None,
            stopped_by=self.stopped_by,
            notes=notes,
            proven_infeasible=self.infeasible,
        )


# The bound over several moments: for gaps of more than this share of the keep-all cost, with this
# share of the time limit kept for it, in a search that is not made short on purpose.
CHAIN_GAP, CHAIN_SHARE, CHAIN_EFFORT, CHAIN_S = 3e-3, 0.15, 0.1, 30.0
BOUND_S, SMALLEST_PEAK_S = 2.0, 3.0  # at most, whatever the time limit
QUICK_STATES, MOST_STATES = 60_000, 1_500_000  # a tenth of a second, and a few seconds
LARGER, STEPS_DOWN = (1.5, 2.25, 4.0, 8.0), 5  # budgets to come down from, and in how many steps
WORTH_REPEATING = 3e-4  # of the keep-all cost: a round that gained that much is done once more
MOST_IN_VAIN = 4  # rounds, each twice as long, that bring no schedule nearer to the budget:
NEARER = 0.05  # by this share of what is missing
LONGER = 8  # two walks that meet only at their ends seldom end in the same bad place
GENERATIONS, TRIES_OF_A_GENERATION = 6, 250_000  # tries of each search, over the number of ops
MOVES_OF_A_TRY = 6000  # the moves of annealing that take as long as one try of rebuilding
