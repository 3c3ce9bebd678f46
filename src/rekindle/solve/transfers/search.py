"""Recomputation and transfers together: the cheapest of many sequences that transfers make fit.

A schedule that was solved for a larger budget recomputes less; transfers bring it down to the given
one. How much larger is a trade-off of one number, since more relief costs nothing as long as the
lanes keep up and much as soon as ops wait: its best value is searched by trials around what the
link can carry in a forward pass. Then single recomputations of the best one are taken out, the
costly ones first, where transfers can carry their values instead.

Every candidate is judged by `simulate`. The given solution is one of them, so the answer is never
worse than recomputation alone. Who knows more of time than the lanes do (that kernels run slower
beside transfers) gives a `rank` of its own, by which candidates are compared instead.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, Status, keep_all, simulate
from rekindle.errors import InvalidSchedule
from rekindle.solve.base import Solver, run_solver, trivial_floor
from rekindle.solve.transfers.bound import least_cost, transfer_bound
from rekindle.solve.transfers.fit import fit
from rekindle.solve.transfers.gaps import sequence_of

# Shares of what the link carries while the forward runs: what else is tried lies around the best.
FIRST_TRIALS = (1.0, 0.7, 1.4, 0.4)
FOR_BUDGETS = 0.45  # of the time limit, at most
FOR_BOUND = 0.15  # of the time limit: a proof is worth less than a better schedule
Rank = Callable[[Schedule], int]
LARGEST = 2**60  # of sums of sizes and of times; what is added up here stays below 2^63


def with_transfers(
    solver: Solver,
    problem: Problem,
    budget: int,
    solution: Solution,
    *,
    time_limit_s: float,
    seed: int = 0,
    rank: Rank | None = None,
) -> Solution:
    """A solution that may move values too: the given one of recomputation alone, or a cheaper one.
    `solver` is asked for schedules of larger budgets; of two schedules the one with the smaller
    `rank` is better, or with the smaller cost."""
    start = time.monotonic()
    if problem.transfers is None:
        return solution
    if _too_large(problem):
        note = "values are not moved: sizes or times are too large to be added up in 64 bits"
        return replace(solution, notes=(*solution.notes, note))
    deadline = start + (1 - FOR_BOUND) * time_limit_s
    search = _Search(solver, problem, budget, deadline, seed, rank)
    search.begin(solution)
    least = least_cost(problem)
    # Who interrupted the first search wants an answer: what transfers do for it, and no more.
    stopped_by = "interrupt" if solution.stopped_by == "interrupt" else ""
    try:
        if not stopped_by and (search.best is None or search.cost > least):
            search.larger_budgets(start + FOR_BUDGETS * time_limit_s)
            search.fewer_runs()
    except KeyboardInterrupt:  # the best so far is the answer
        stopped_by = "interrupt"
    if not stopped_by and time.monotonic() >= search.deadline:
        stopped_by = "time limit"
    # Recomputation's own bound and proof know no transfers.
    if search.best is None:
        solution = replace(solution, wall_s=solution.wall_s + time.monotonic() - start)
        return _not_found(problem, budget, solution)
    bound = least
    if stopped_by != "interrupt":
        left = start + time_limit_s - time.monotonic()
        bound = transfer_bound(problem, budget, search.cost, left)
    proven = search.cost <= bound
    found = replace(
        solution,
        status=Status.OPTIMAL if proven else Status.FEASIBLE,
        schedule=search.best,
        smallest=None,
        bound=bound,
        wall_s=solution.wall_s + time.monotonic() - start,
        stopped_by="proof" if proven else stopped_by,
    )
    if not search.best.transfers:
        found = replace(found, notes=(*solution.notes, "nothing found that is better moved"))
    elif solution.schedule is not None:
        alone = simulate(problem, solution.schedule).cost
        note = f"recomputation alone costs {alone}, with values moved {search.cost}"
        found = replace(found, message="", notes=(*solution.notes, note))
    return found


def _not_found(problem: Problem, budget: int, solution: Solution) -> Solution:
    """Neither way met the budget. A proof about recomputation alone is none about both, but that
    what one op reads and makes is more than the budget."""
    if solution.status is not Status.INFEASIBLE or budget < trivial_floor(problem):
        return solution
    message = "no schedule within the budget was found, with values moved to the host or without"
    return replace(solution, message=message, bound=None)


def _too_large(problem: Problem) -> bool:
    link = problem.transfers
    assert link is not None
    sizes = sum(value.size for value in problem.values)
    slower = min(link.to_host, link.from_host)
    moving = len(problem.values) * link.latency + sizes * 10**9 // slower
    sizes += sum(op.workspace for op in problem.ops)
    return max(sizes, moving + sum(op.cost for op in problem.ops)) >= LARGEST


@dataclass(slots=True)
class _Search:
    solver: Solver
    problem: Problem
    budget: int
    deadline: float
    seed: int
    rank: Rank | None = None
    best: Schedule | None = None
    cost: int = 0
    score: int = 0  # what candidates are compared by: the rank, or the cost
    peak: int = 0
    ops: tuple[int, ...] = ()  # that the best was fitted from
    plain: Schedule | None = None  # without transfers, where the solver starts
    tried: set[tuple[int, ...]] = field(default_factory=set)

    def begin(self, solution: Solution) -> None:
        if solution.schedule is not None:
            self.plain = solution.schedule
            self._judge(solution.schedule, solution.schedule.ops)
        elif solution.smallest is not None:
            self._fit(solution.smallest.ops)
        self._fit(keep_all(self.problem).ops)

    # ---- how much less to recompute

    def larger_budgets(self, until: float) -> None:
        """Solves for larger budgets, first around what the link can carry, then around the best."""
        largest = simulate(self.problem, keep_all(self.problem)).peak - self.budget
        carried = self._carried()
        seen: dict[int, int] = {}  # relief -> score
        for trial, relief in enumerate(self._reliefs(seen, carried, largest)):
            left = until - time.monotonic()
            if left < 0.02 or trial >= 10:
                return
            solution = run_solver(
                self.solver,
                self.problem,
                self.budget + relief,
                time_limit_s=left / 5,
                seed=self.seed,
                warm_start=self.plain,
            )
            if solution.schedule is None:
                seen[relief] = 2**63
                continue
            seen[relief] = self._fit(solution.schedule.ops)
            if solution.stopped_by == "interrupt":
                raise KeyboardInterrupt

    def _carried(self) -> int:
        """Bytes that go to the host while the forward runs (half of all, without a loss)."""
        link = self.problem.transfers
        assert link is not None
        costs = [op.cost for op in self.problem.ops]
        loss = self.problem.loss_op
        forward = sum(costs) // 2 if loss is None else sum(costs[:loss])
        return min(link.to_host, link.from_host) * forward // 10**9

    def _reliefs(self, seen: dict[int, int], carried: int, largest: int) -> Iterator[int]:
        """How far above the budget to solve next, given what the ones before came to."""
        for share in FIRST_TRIALS:
            relief = min(int(share * carried), largest - 1)
            if relief > 0 and relief not in seen:
                yield relief
        while seen:
            at = min(seen, key=lambda relief: (seen[relief], relief))
            below = max((r for r in seen if r < at), default=0)
            above = min((r for r in seen if r > at), default=min(2 * at, largest - 1))
            # Into the wider side of the best.
            relief = (below + at) // 2 if at - below >= above - at else (at + above) // 2
            if relief in seen or abs(relief - at) * 100 < self.budget:
                return
            yield relief

    # ---- which recomputations are not needed any more

    def fewer_runs(self) -> None:
        """Takes runs out of the best, and of recomputation alone: where memory is full long before
        the link has carried much, a schedule for a larger budget makes ops wait."""
        self._without_runs(self.ops)
        if self.plain is not None:
            self._without_runs(self.plain.ops)

    def _without_runs(self, ops: tuple[int, ...]) -> None:
        """One run after the other, the costly ones first, while that makes it cheaper."""
        cost = self._fit(ops) if ops != self.ops else self.score
        improved = True
        while improved:
            improved = False
            for t in self._repeated(ops):
                if time.monotonic() > self.deadline:
                    return
                shorter = list(ops[:t] + ops[t + 1 :])
                tried = tuple(_native.drop_dead_runs(self.problem.native, shorter))
                found = self._fit(tried)
                if found < cost:
                    ops, cost, improved = tried, found, True
                    break

    def _repeated(self, ops: tuple[int, ...]) -> list[int]:
        """Places of runs that follow one of the same op, the costly ones first."""
        ran: set[int] = set()
        found = []
        for t, i in enumerate(ops):
            if i in ran:
                found.append(t)
            ran.add(i)
        return sorted(found, key=lambda t: -self.problem.ops[ops[t]].cost)

    # ---- candidates

    def _fit(self, ops: tuple[int, ...]) -> int:
        """The score of the ops with transfers that make them fit; more than any where none do."""
        worst: int = 2**63
        if ops in self.tried:
            return worst
        self.tried.add(ops)
        schedule = fit(sequence_of(self.problem, ops), self.budget)
        return worst if schedule is None else self._judge(schedule, ops)

    def _judge(self, schedule: Schedule, ops: tuple[int, ...]) -> int:
        worst: int = 2**63
        try:
            trace = simulate(self.problem, schedule)
        except InvalidSchedule:
            return worst  # over the host budget, or later than any clock: no answer
        if trace.peak > self.budget:
            return worst
        score = trace.cost if self.rank is None else self.rank(schedule)
        if self.best is None or (score, trace.peak) < (self.score, self.peak):
            self.best, self.cost, self.peak, self.ops = schedule, trace.cost, trace.peak, ops
            self.score = score
        return score
