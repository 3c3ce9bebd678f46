"""The contract of a solver (`Solver`), and the one function that calls them all (`run_solver`).

A solver sees only a `Problem` and a budget in whole size units (bytes). It answers with a
`Solution`, whose schedule counts only once `check_schedule` and `simulate` have confirmed it
(`verify_solution`): a solver's own idea of memory never reaches a user. A search that
fails is data: a solution without a schedule, with a status and a sentence.

A new solver is a final frozen dataclass in a module of its own and a line in `registry.SOLVERS`.
`best_solution` makes the answer out of the schedules it has found.
"""

import functools
import importlib.util
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

from rekindle.core import Op, Problem, Schedule, Solution, Status, check_schedule, simulate
from rekindle.errors import InvalidSchedule, SolverRefused, SolverUnavailable
from rekindle.solve.deadline import TimeLeft

# How each library that a solver may need is installed.
PIP_NAMES = {"highspy": "highspy", "ortools": '"rekindle[cp]"', "gurobipy": "gurobipy"}

# The native core adds up in signed 64 bits. A value may be alive twice (the old copy until its last
# use, beside the new one), so sizes leave three bits; a schedule may run everything again and
# again, so costs leave seven.
LARGEST_SIZES = 2**60
LARGEST_COSTS = 2**56


class Solver(Protocol):
    """A final frozen dataclass whose fields are its options."""

    # Class variables, so that they are no fields: the fields are the options, and the repr of a
    # solver, which names them all, is part of the key under which its solutions are kept.
    name: ClassVar[str]
    requires: ClassVar[tuple[str, ...]]  # import names; probed here, imported only inside `solve`
    exact: ClassVar[bool]  # proves optimality over its own space of schedules, given time

    def accepts(self, problem: Problem) -> str | None:
        """None, or the reason why this method cannot handle the problem."""

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        """The best schedule found within the budget. Keeps the time limit and returns the best so
        far on KeyboardInterrupt."""


def too_large(problem: Problem) -> str | None:
    """None, or why the native searches, which add up in 64 bits, would not be exact."""
    total = sum(value.size for value in problem.values) + sum(op.workspace for op in problem.ops)
    if total >= LARGEST_SIZES:
        return f"its sizes sum to {total}, and sums are exact up to 2^60; use a larger size unit"
    cost = sum(op.cost for op in problem.ops)
    if cost >= LARGEST_COSTS:
        return f"its costs sum to {cost}, and sums are exact up to 2^56; use a larger cost unit"
    return None


def missing_requirements(solver: Solver) -> tuple[str, ...]:
    """The packages that are not installed; found without importing them, which would be slow."""
    return tuple(name for name in solver.requires if importlib.util.find_spec(name) is None)


def unavailable(solver: Solver) -> str | None:
    """None, or the sentence that says what to install."""
    missing = missing_requirements(solver)
    if not missing:
        return None
    packages = " ".join(PIP_NAMES.get(name, name) for name in missing)
    return f"solver {solver.name!r} needs {', '.join(missing)}: pip install {packages}"


def run_solver(
    solver: Solver,
    problem: Problem,
    budget: int,
    *,
    time_limit_s: float = 60.0,
    seed: int = 0,
    warm_start: Schedule | None = None,
) -> Solution:
    """Refuses what cannot be solved, removes dead ops, solves, and verifies the solution."""
    if (sentence := unavailable(solver)) is not None:
        raise SolverUnavailable(sentence)
    start = time.monotonic()
    # Dead ops go first: "every op runs at least once", from which most solvers take their first
    # bound, holds only for ops that some output needs.
    small, kept = without_dead_ops(problem)
    small, shift = _scale_costs(small)
    if (reason := solver.accepts(small)) is not None:
        raise SolverRefused(f"solver {solver.name!r} does not handle this problem: {reason}")
    if warm_start is not None:
        # Runs of dead ops fall out. What is left is valid: nothing that stays reads what they made.
        warm_start = _translate_to(kept, warm_start)
    solve = functools.partial(solve_pinned, solver) if small.pinned else solver.solve
    solution = solve(small, budget, time_limit_s=time_limit_s, seed=seed, warm_start=warm_start)
    if shift:
        # Costs were rounded down, so the bound holds; a proof does not.
        proven = solution.status is Status.OPTIMAL
        solution = replace(
            solution,
            bound=None if solution.bound is None else solution.bound << shift,
            status=Status.FEASIBLE if proven else solution.status,
        )
    solution = replace(
        solution,
        schedule=_translate_from(kept, solution.schedule),
        smallest=_translate_from(kept, solution.smallest),
        solver=solution.solver or solver.name,
        seed=seed,
        wall_s=time.monotonic() - start,
    )
    return verify_solution(problem, budget, solution)


# Of the time limit: for the first search, and for those that follow where pins need more.
_PINNED_SHARES = (0.5, 0.2, 0.15, 0.15)


def solve_pinned(
    solver: Solver,
    problem: Problem,
    budget: int,
    *,
    time_limit_s: float,
    seed: int,
    warm_start: Schedule | None = None,
) -> Solution:
    """A problem with pinned values, by a solver that knows none: the problem without pins is a
    relaxation, whose bounds and proofs of infeasibility hold. Where its schedule needs more with
    the pins than the budget, the solver's budget is less by the excess, and it searches again."""
    relaxed, left = replace(problem, pinned=()), TimeLeft(time_limit_s)
    target, bound, smallest = budget, None, None
    solution: Solution | None = None
    for share in _PINNED_SHARES:
        limit_s = min(share * time_limit_s, left())
        found = solver.solve(
            relaxed, target, time_limit_s=limit_s, seed=seed, warm_start=warm_start
        )
        if solution is None:
            solution, bound = found, found.bound
        for schedule in (found.schedule, found.smallest):
            if schedule is not None:
                trace = simulate(problem, schedule)
                if smallest is None or (trace.peak, trace.cost) < smallest[:2]:
                    smallest = (trace.peak, trace.cost, schedule)
        if found.schedule is None:
            break
        peak = simulate(problem, found.schedule).peak
        if peak <= budget:
            return replace(found, status=Status.FEASIBLE, bound=bound)
        target, warm_start = target - (peak - budget), found.schedule
        if target < 0 or found.stopped_by == "interrupt":
            break
    assert solution is not None
    if smallest is not None and smallest[0] <= budget:  # found on the way to something else
        return replace(solution, status=Status.FEASIBLE, schedule=smallest[2], bound=bound)
    return replace(
        solution,
        status=Status.INFEASIBLE if solution.schedule is not None else solution.status,
        schedule=None,
        smallest=None if smallest is None else smallest[2],
    )


def _scale_costs(problem: Problem) -> tuple[Problem, int]:
    """The problem with costs that sum to less than 2^50, and the power of two they were divided
    by: solvers add up the costs of many runs, in 64 bits or in floats."""
    # 2^50 leaves three bits below 2^53, up to which a float counts whole numbers: the rows of the
    # MILPs and the temperatures of annealing are floats.
    shift = max(0, sum(op.cost for op in problem.ops).bit_length() - 50)
    if shift:
        ops = tuple(replace(op, cost=op.cost >> shift) for op in problem.ops)
        problem = replace(problem, ops=ops)
    return problem, shift


def verify_solution(problem: Problem, budget: int, solution: Solution) -> Solution:
    """The solution as simulation confirms it: an invalid schedule becomes an error, one above the
    budget becomes the smallest peak found."""
    assert solution.status.has_schedule == (solution.schedule is not None), solution.status
    try:
        if solution.smallest is not None:
            check_schedule(problem, solution.smallest)
        if solution.schedule is None:
            return solution
        # On the problem as it was given, dead ops included, not on the one that the solver saw: so
        # a mistake in the translation between the two is found as well.
        trace = simulate(problem, solution.schedule)
    except InvalidSchedule as error:
        return replace(
            solution,
            status=Status.ERROR,
            schedule=None,
            smallest=None,
            message=f"{solution.solver!r} made a schedule that cannot be executed ({error}); "
            "please report this, and try another solver",
        )
    # Too large is not invalid: it is an answer to "how small can it get".
    if trace.peak > budget:
        return replace(
            solution,
            status=Status.TIME_LIMIT,
            schedule=None,
            smallest=solution.smallest or solution.schedule,
            message=solution.message
            or f"the best schedule of {solution.solver!r} has a peak of {trace.peak}",
        )
    # A bound that has met the cost is a proof, whatever status the solver gave itself.
    if solution.bound is not None and solution.bound >= trace.cost:
        return replace(solution, status=Status.OPTIMAL, bound=trace.cost)
    return solution


def best_solution(
    problem: Problem,
    budget: int,
    candidates: Iterable[Sequence[int]],
    *,
    solver: str,
    bound: int | None = None,
    stopped_by: str = "",
    notes: tuple[str, ...] = (),
    proven_infeasible: bool = False,
    space: str = "",
) -> Solution:
    """The Solution that some found schedules amount to: the cheapest within the budget (ties: the
    smaller peak). Where none is within it, the smallest peak among them: infeasible where that is
    proven, over the `space` of the method if it has one, else nothing found."""
    best: tuple[int, int, Schedule] | None = None
    smallest: tuple[int, int, Schedule] | None = None
    for ops in candidates:
        schedule = Schedule(tuple(ops))
        trace = simulate(problem, schedule)
        if smallest is None or (trace.peak, trace.cost) < smallest[:2]:
            smallest = (trace.peak, trace.cost, schedule)
        if trace.peak <= budget and (best is None or (trace.cost, trace.peak) < best[:2]):
            best = (trace.cost, trace.peak, schedule)
    if best is not None:
        optimal = bound is not None and bound >= best[0]
        return Solution(
            status=Status.OPTIMAL if optimal else Status.FEASIBLE,
            schedule=best[2],
            solver=solver,
            bound=best[0] if optimal else bound,
            stopped_by=stopped_by,
            notes=notes,
        )
    # Nothing fits. What is said about it goes from the strongest statement down: a proof by
    # inspection, a proof over the space of the solver, no proof.
    floor = trivial_floor(problem)
    proven = proven_infeasible or budget < floor
    if proven:
        message = f"proven: no schedule has a peak of {budget} or less"
        if space:
            message = f"proven over {space}: none has a peak of {budget} or less"
        if budget < floor:
            message = f"proven: some op or all outputs alone need {floor}, the budget is {budget}"
    else:
        message = "no schedule within the budget was found; that is not a proof that there is none"
    return Solution(
        status=Status.INFEASIBLE if proven else Status.TIME_LIMIT,
        schedule=None,
        solver=solver,
        message=message,
        smallest=smallest[2] if smallest else None,
        stopped_by=stopped_by,
        notes=notes,
    )


def trivial_floor(problem: Problem) -> int:
    """A budget below this is infeasible by inspection: the largest op with its inputs and outputs,
    and all outputs (with what is held) together at the end."""
    resident = set(problem.resident)
    sizes = [0 if v in resident else value.size for v, value in enumerate(problem.values)]
    floor = sum(sizes[v] for v in {*problem.outputs, *problem.held})
    for op in problem.ops:
        need = sum(sizes[v] for v in op.inputs) + sum(sizes[v] for v in op.outputs)
        # Whether the input can die here is not known; a floor counts as if it could.
        saved = sum(sizes[out] for _, out in op.inplace)
        floor = max(floor, need + op.workspace - saved)
    return floor


def without_dead_ops(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """The problem without the ops that nothing needs, and the old id of each op that stays.

    An op stays if it must run once, makes an output, or makes what a staying op reads.
    """
    outputs = set(problem.outputs)
    needed = [False] * len(problem.values)
    stays = [False] * len(problem.ops)
    # One pass is enough: the listed order is topological, so all readers of what op i makes have
    # been decided before it.
    for i in range(len(problem.ops) - 1, -1, -1):
        op = problem.ops[i]
        stays[i] = op.once or any(needed[v] or v in outputs for v in op.outputs)
        if stays[i]:
            for v in op.inputs:
                needed[v] = True
    if all(stays):
        return problem, tuple(range(len(problem.ops)))
    kept = tuple(i for i, stay in enumerate(stays) if stay)
    new_op = {old: new for new, old in enumerate(kept)}
    # Ids are positions, so everything behind a gap moves up.
    gone = {v for i, op in enumerate(problem.ops) if not stays[i] for v in op.outputs}
    values = [v for v in range(len(problem.values)) if v not in gone]
    new_value = {old: new for new, old in enumerate(values)}

    def translate(op: Op) -> Op:
        return replace(
            op,
            inputs=tuple(new_value[v] for v in op.inputs),
            outputs=tuple(new_value[v] for v in op.outputs),
            inplace=tuple((new_value[a], new_value[b]) for a, b in op.inplace),
            grad_of=None if op.grad_of is None else new_op.get(op.grad_of),
        )

    small = Problem(
        values=tuple(problem.values[v] for v in values),
        ops=tuple(translate(problem.ops[i]) for i in kept),
        resident=tuple(new_value[v] for v in problem.resident),
        outputs=tuple(new_value[v] for v in problem.outputs),
        held=tuple(new_value[v] for v in problem.held),
        pinned=tuple((new_value[v], new_op[i]) for v, i in problem.pinned),
        name=problem.name,
        cost_unit=problem.cost_unit,
        size_unit=problem.size_unit,
    )
    return small, kept


def _translate_to(kept: tuple[int, ...], schedule: Schedule) -> Schedule:
    """From ids of the whole problem to ids of the one without dead ops."""
    new_op = {old: new for new, old in enumerate(kept)}
    return Schedule(tuple(new_op[i] for i in schedule.ops if i in new_op))


def _translate_from(kept: tuple[int, ...], schedule: Schedule | None) -> Schedule | None:
    """And back."""
    if schedule is None:
        return None
    return Schedule(tuple(kept[i] for i in schedule.ops))
