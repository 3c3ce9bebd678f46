"""Constraints by the user: ops that must run once (`save`), and ops whose results must not be kept
for the backward (`recompute`).

Meaning, over any schedule of the problem:

- `save`: a matching forward op runs no more than once. What is needed of it later is kept.
- `recompute`: no copy of what a matching forward op makes lives from before the loss to a use after
  it; what the backward reads of it is recomputed there. What the caller holds is the caller's.

Every solver respects both, because they become part of an ordinary problem (`constrain`): `save`
clears `recomputable`. For `recompute` the op gets a twin behind the loss (it reads a token that the
loss makes), and the backward and other twins read the twin's results. A schedule of that problem is
one of the given problem with twin and op the same, with no larger peak (`to_original`). One gap is
closed there: an op that has no twin may run again behind the loss and read what stands before it;
then its argument is recomputed first. `check_constraints` has the last word on the result.

Known limits: the twin and a second run of the op behind the loss are two runs where one would do;
`drop_needless_runs` removes what it can. A lower bound is one of the problem without constraints,
which is a relaxation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle import _native
from rekindle.core import Op, Problem, Schedule, Solution, Status, Value, check_problem, simulate
from rekindle.errors import InvalidSchedule, WishRefused
from rekindle.solve.base import Solver, run_solver, without_dead_ops
from rekindle.solve.lower_bound import best_bound
from rekindle.solve.min_budget import min_budget
from rekindle.solve.op_patterns import matches, parts_of

Patterns = Sequence[str]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Patterns as the user wrote them; see `op_patterns.matches`."""

    save: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.save or self.recompute)

    def __str__(self) -> str:
        parts = [f"save={list(self.save)}"] if self.save else []
        parts += [f"recompute={list(self.recompute)}"] if self.recompute else []
        return ", ".join(parts)


def parse_constraints(save: str | Patterns = (), recompute: str | Patterns = ()) -> Constraints:
    """Patterns from what a caller gave: one, or several."""
    given = []
    for name, patterns in (("save", save), ("recompute", recompute)):
        listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        for pattern in listed:
            if not isinstance(pattern, str) or not pattern.strip():
                raise WishRefused(f"{name}: {pattern!r} is no pattern; give module paths or ops")
        given.append(listed)
    return Constraints(*given)


@dataclass(frozen=True, slots=True)
class ResolvedConstraints:
    """The constraints as op ids."""

    save: frozenset[int]
    recompute: frozenset[int]


def resolve(problem: Problem, constraints: Constraints) -> ResolvedConstraints:
    """The ops that the patterns match; raises WishRefused where one matches none, or asks for what
    cannot be done."""
    saved = _matching(problem, "save", constraints.save)
    again = _matching(problem, "recompute", constraints.recompute)
    # Not a matter of which comes first: a user who names an op twice has made a mistake.
    if both := saved.keys() & again.keys():
        op = min(both)
        raise WishRefused(
            f"{problem.ops[op].name!r} is to be saved ({saved[op]!r}) and to be recomputed "
            f"({again[op]!r}); leave one out"
        )
    if again and problem.loss_op is None:
        raise WishRefused("recompute: this problem has no loss, so nothing is kept for a backward")
    return ResolvedConstraints(frozenset(saved), frozenset(again))


def _matching(problem: Problem, kind: str, patterns: Patterns) -> dict[int, str]:
    """Per forward op that is matched: the pattern that matches it first."""
    found: dict[int, str] = {}
    # Forward ops alone. What the backward makes is never kept for anything else, so there is
    # nothing to say about it.
    forward = [i for i, op in enumerate(problem.ops) if op.phase == "forward"]
    for pattern in patterns:
        mine = [i for i in forward if matches(pattern, problem.ops[i].name)]
        if not mine:
            raise WishRefused(f"{kind}: {pattern!r} means no op of the forward{_hint(problem)}")
        for i in mine:
            found.setdefault(i, pattern)
    return found


def _hint(problem: Problem) -> str:
    paths = dict.fromkeys(parts_of(op.name)[1] for op in problem.ops if op.phase == "forward")
    known = [path for path in paths if path]
    if not known:
        return "; this problem names no modules, so give ops, such as 'aten.mm*'"
    shown = ", ".join(known[:6]) + (", ..." if len(known) > 6 else "")
    return f"; its modules are {shown}"


# ---- the problem with the constraints in it


@dataclass(frozen=True, slots=True)
class ConstrainedProblem:
    """An ordinary problem, and per op of it the op of the given one."""

    problem: Problem
    origin: tuple[int, ...]


def constrain(problem: Problem, resolved: ResolvedConstraints) -> ConstrainedProblem:
    """The constraints as an ordinary problem, which any solver can take."""
    ops = [
        replace(op, recomputable=False) if i in resolved.save else op
        for i, op in enumerate(problem.ops)
    ]
    if not resolved.recompute:
        return ConstrainedProblem(replace(problem, ops=tuple(ops)), tuple(range(len(ops))))
    if problem.pinned:
        raise WishRefused(
            "recompute: the problem has pinned values, whose ops run around opaque code; only "
            "`save` is possible there"
        )
    made = _Twins(problem, ops, resolved.recompute).build()
    # The twins are ours and no reader of files has seen them: a mistake must not reach a solver.
    check_problem(made.problem)
    return made


class _Twins:
    """Puts a twin of each op that is to be recomputed behind the loss, before its first reader."""

    def __init__(self, problem: Problem, ops: Sequence[Op], again: frozenset[int]) -> None:
        self.problem, self.given, self.again = problem, ops, again
        self.exempt = {*problem.held, *problem.outputs}
        self.values = list(problem.values)
        self.twin_of: dict[int, int] = {}  # value -> the twin's
        self.ops: list[Op] = []
        self.origin: list[int] = []
        self.place: dict[int, int] = {}  # op of the given problem -> its place in the new one
        self.token = -1

    def build(self) -> ConstrainedProblem:
        behind = False
        for i, op in enumerate(self.given):
            if op.phase == "loss":
                # A twin reads the token, so no schedule runs it before the loss, where its result
                # would be the very copy that is not to be kept. It has no size: to keep it costs
                # nothing.
                self.token = len(self.values)
                self.values.append(Value("after the loss", 0))
                op = replace(op, outputs=(*op.outputs, self.token))
                behind = True
            elif behind:
                op = self._after_loss(op)
            self._add(op, i)
        ops = [
            op if op.grad_of is None else replace(op, grad_of=self.place[op.grad_of])
            for op in self.ops
        ]
        new = replace(self.problem, values=tuple(self.values), ops=tuple(ops))
        return ConstrainedProblem(new, tuple(self.origin))

    def _add(self, op: Op, origin: int) -> None:
        self.place.setdefault(origin, len(self.ops))
        self.ops.append(op)
        self.origin.append(origin)

    def _after_loss(self, op: Op) -> Op:
        """The op with the twins' results for what it reads; makes those twins first."""
        for v in op.inputs:
            self._need(v)
        # An op that wrote over the forward's result now writes over the twin's.
        new = {v: self.twin_of.get(v, v) for v in (*op.inputs, *op.outputs)}
        return replace(
            op,
            inputs=tuple(dict.fromkeys(new[v] for v in op.inputs)),
            inplace=tuple((new[a], b) for a, b in op.inplace),
        )

    def _need(self, value: int) -> None:
        # Depth first on a stack of our own: a chain of ops to be recomputed is as long as the model
        # is deep, which is beyond the recursion limit of Python.
        stack = [value]
        while stack:
            v = stack[-1]
            by = self.problem.producer[v]
            if v in self.twin_of or by not in self.again or v in self.exempt:
                stack.pop()
                continue
            op = self.given[by]
            if self.problem.values[v].size == 0 and op.once:
                stack.pop()  # order alone: nothing is kept
                continue
            if op.once:
                raise WishRefused(
                    f"recompute: {op.name!r} can run only once (it changes what is outside, or "
                    "what it reads is gone afterwards), and the backward needs its result; name "
                    "what lies around it"
                )
            missing = [
                u
                for u in op.inputs
                if u not in self.twin_of
                and self.problem.producer[u] in self.again
                and u not in self.exempt
                and not (self.given[self.problem.producer[u]].once and not self._size(u))
            ]
            if missing:
                stack += missing
                continue
            stack.pop()
            self._twin(by, op)

    def _size(self, v: int) -> int:
        return self.problem.values[v].size

    def _twin(self, by: int, op: Op) -> None:
        outputs = []
        for v in op.outputs:
            self.twin_of[v] = len(self.values)
            outputs.append(len(self.values))
            self.values.append(replace(self.values[v], name=f"{self.values[v].name} again"))
        inputs = tuple(dict.fromkeys(self.twin_of.get(v, v) for v in op.inputs))
        pairs = tuple((self.twin_of.get(a, a), self.twin_of[b]) for a, b in op.inplace)
        twin = replace(
            op,
            inputs=(*inputs, self.token),
            outputs=tuple(outputs),
            inplace=pairs,
            # Whoever cuts a step at the loss must find the twin behind it: it reads what the loss
            # makes.
            phase="backward",
        )
        self._add(twin, by)


# ---- back to the given problem


def to_original(
    problem: Problem, resolved: ResolvedConstraints, made: ConstrainedProblem, schedule: Schedule
) -> Schedule:
    """A schedule of the constrained problem as one of the given problem; keeps the constraints."""
    ops = [made.origin[i] for i in schedule.ops]
    return Schedule(tuple(_make_anew(problem, resolved.recompute, ops)))


def _make_anew(problem: Problem, again: frozenset[int], ops: Sequence[int]) -> list[int]:
    """Behind the loss, what is to be recomputed runs again before its first use."""
    # `stale`: results whose copy is from before the loss and must not be read any more. The loss
    # makes all of them stale at once, a run of the producer makes its own fresh.
    watched = _values_to_remake(problem, again)
    stale: set[int] = set()
    result: list[int] = []
    for wanted in ops:
        stack = [wanted]
        while stack:
            op = problem.ops[stack[-1]]
            missing = [problem.producer[v] for v in op.inputs if v in stale]
            if missing:
                stack += missing
                continue
            result.append(stack.pop())
            stale.difference_update(op.outputs)
            if op.phase == "loss":
                stale.update(watched)
            while stack and not stale.intersection(problem.ops[stack[-1]].outputs):
                if len(stack) == 1:
                    break
                stack.pop()  # made for another reader meanwhile
    return result


def _values_to_remake(problem: Problem, again: frozenset[int]) -> set[int]:
    exempt = {*problem.held, *problem.outputs}
    return {
        v
        for i in again
        for v in problem.ops[i].outputs
        if v not in exempt and (problem.values[v].size or not problem.ops[i].once)
    }


def check_constraints(problem: Problem, resolved: ResolvedConstraints, schedule: Schedule) -> None:
    """Raises InvalidSchedule with one sentence where a schedule breaks a constraint."""
    runs = simulate(problem, schedule).runs
    for i in sorted(resolved.save):
        if runs[i] > 1:
            raise InvalidSchedule(
                f"{problem.ops[i].name!r} is to be saved and runs {runs[i]} times"
            )
    stale: set[int] = set()
    watched = _values_to_remake(problem, resolved.recompute)
    for op_id in schedule.ops:
        for v in problem.ops[op_id].inputs:
            if v in stale:
                name = problem.ops[problem.producer[v]].name
                raise InvalidSchedule(f"the result of {name!r} is to be recomputed and is kept")
        stale.difference_update(problem.ops[op_id].outputs)
        if op_id == problem.loss_op:
            stale = set(watched)


def run_constrained(
    solver: Solver,
    problem: Problem,
    budget: int,
    constraints: Constraints,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    warm_start: Schedule | None = None,
) -> Solution:
    """`run_solver` on the problem as the user wants it; the answer is one of the given problem.
    `warm_start` is one of that too, and serves where there are no constraints."""
    if not constraints:
        return run_solver(
            solver, problem, budget, time_limit_s=time_limit_s, seed=seed, warm_start=warm_start
        )
    resolved = resolve(problem, constraints)
    made = constrain(problem, resolved)
    solution = run_solver(solver, made.problem, budget, time_limit_s=time_limit_s, seed=seed)
    if solution.schedule is None:
        smallest = solution.smallest
        return replace(
            solution,
            smallest=None if smallest is None else to_original(problem, resolved, made, smallest),
            message=f"with {constraints}: {solution.message or solution.status.value}",
        )
    best: tuple[int, int, Schedule] | None = None
    mapped = to_original(problem, resolved, made, solution.schedule)
    # In the given problem twin and op are one, so some of the runs may not be needed; to leave them
    # out may break a constraint again, which `_make_anew` repairs.
    shorter = _native.drop_needless_runs(problem.native, list(mapped.ops), budget, 1.0)
    for ops in (mapped.ops, _make_anew(problem, resolved.recompute, shorter)):
        schedule = Schedule(tuple(ops))
        trace = simulate(problem, schedule)
        if trace.peak <= budget and (best is None or (trace.cost, trace.peak) < best[:2]):
            best = (trace.cost, trace.peak, schedule)
    if best is None:
        return replace(
            solution,
            status=Status.TIME_LIMIT,
            schedule=None,
            smallest=mapped,
            bound=None,
            message=f"with {constraints}: what was found has a peak above the budget",
        )
    check_constraints(problem, resolved, best[2])
    if not resolved.recompute:  # the solver's own proof holds
        return replace(solution, schedule=best[2])
    # The solver's own bound is of the problem with twins, in which an op and its twin both run,
    # where here one more run of the op may do for both. The bound of the problem without
    # constraints holds: constraints only take schedules away.
    small, _ = without_dead_ops(problem)
    extra, _ = best_bound(small, budget, min(1.0, time_limit_s))
    bound = min(sum(op.cost for op in small.ops) + extra, best[0])
    status = Status.OPTIMAL if bound == best[0] else Status.FEASIBLE
    return replace(solution, schedule=best[2], bound=bound, status=status)


def constrained_min_budget(
    problem: Problem, constraints: Constraints, time_limit_s: float = 5.0
) -> Schedule:
    """The schedule with the smallest peak found that keeps the constraints. Not a proof."""
    if not constraints:
        return min_budget(problem, time_limit_s)
    resolved = resolve(problem, constraints)
    made = constrain(problem, resolved)
    return to_original(problem, resolved, made, min_budget(made.problem, time_limit_s))
