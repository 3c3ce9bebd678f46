"""`plan` and `rematerialize`: the line itself, one call per stage."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from rekindle.capture import JointGraph, Program, analyse, capture
from rekindle.core import (
    Problem,
    Schedule,
    Solution,
    Status,
    check_schedule,
    keep_all,
    parse_budget,
    simulate,
)
from rekindle.costs import costs_of
from rekindle.errors import BudgetInfeasible
from rekindle.formulate import formulate
from rekindle.lower.module import Manager, OnMiss, manage, plain_forward
from rekindle.lower.run import Runner
from rekindle.solve.base import Solver, run_solver
from rekindle.solve.baselines import smallest_peak
from rekindle.solve.registry import SOLVERS, find_solver

Budget = int | float | str
ScheduleSource = Schedule | Callable[[Problem], Schedule]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Plan:
    """A schedule for one model and one kind of call, with what it costs."""

    joint: JointGraph
    program: Program
    problem: Problem
    schedule: Schedule
    peak_bytes: int
    cost_ns: int
    keep_all_peak_bytes: int
    keep_all_cost_ns: int
    budget_bytes: int | None
    solver: str
    status: Status
    bound: int | None
    runner: Runner

    @property
    def overhead(self) -> float:
        """Cost increase over keep-all: 0.07 is 7 %."""
        if not self.keep_all_cost_ns:
            return 0.0
        return self.cost_ns / self.keep_all_cost_ns - 1


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is to be made; kept by a managed module that plans again."""

    budget: Budget | None
    solver: str | Solver
    time_limit_s: float
    seed: int
    profile: Literal["estimate", "measure"]
    loss_fn: Callable[..., Any] | None
    schedule: ScheduleSource | None


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    profile: Literal["estimate", "measure"] = "estimate",
    loss_fn: Callable[..., Any] | None = None,
    schedule: ScheduleSource | None = None,
) -> Plan:
    """A plan for `model(*args, **kwargs)` within the budget; nothing of the model runs for real."""
    options = Options(budget, solver, time_limit_s, seed, profile, loss_fn, schedule)
    return make_plan(options, model, args, kwargs or {})


def rematerialize(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    profile: Literal["estimate", "measure"] = "estimate",
    inplace: bool = False,
    on_miss: OnMiss = "eager",
    loss_fn: Callable[..., Any] | None = None,
    schedule: ScheduleSource | None = None,
) -> nn.Module:
    """The same model, whose step never needs more than the budget."""
    options = Options(budget, solver, time_limit_s, seed, profile, loss_fn, schedule)
    first = make_plan(options, model, args, kwargs or {})
    manager = Manager(
        on_miss,
        functools.partial(make_plan, options),
        functools.partial(plan_again, options),
        loss_fn,
    )
    manager.add(model, first, args, kwargs or {})
    return manage(model, manager, inplace)


def make_plan(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Plan:
    joint = capture(model, args, kwargs, call=_call(options.loss_fn))
    return plan_joint(options, joint, type(model).__name__)


def plan_again(options: Options, joint: JointGraph, old: Plan, *, same_ops: bool) -> Plan:
    """A plan for other gradients than the old one's; its schedule serves if the ops are the same
    and the budget still holds."""
    if same_ops:
        with contextlib.suppress(BudgetInfeasible):
            kept = plan_joint(replace(options, schedule=old.schedule), joint, old.problem.name)
            return replace(kept, solver=old.solver)
    return plan_joint(options, joint, old.problem.name)


def plan_joint(options: Options, joint: JointGraph, name: str) -> Plan:
    program = analyse(joint)
    problem = formulate(program, costs_of(joint, options.profile), name)
    everything = simulate(problem, keep_all(problem))
    budget = None
    if options.budget is not None:
        budget = parse_budget(options.budget, everything.peak)
    solution = _schedule(options, problem, budget)
    assert solution.schedule is not None
    trace = simulate(problem, solution.schedule)
    return Plan(
        joint=joint,
        program=program,
        problem=problem,
        schedule=solution.schedule,
        peak_bytes=trace.peak,
        cost_ns=trace.cost,
        keep_all_peak_bytes=everything.peak,
        keep_all_cost_ns=everything.cost,
        budget_bytes=budget,
        solver=solution.solver,
        status=solution.status,
        bound=solution.bound,
        runner=Runner(program, solution.schedule),
    )


def _schedule(options: Options, problem: Problem, budget: int | None) -> Solution:
    given = options.schedule
    if given is not None:
        schedule = given if isinstance(given, Schedule) else given(problem)
        check_schedule(problem, schedule)
        if budget is not None and (peak := simulate(problem, schedule).peak) > budget:
            raise BudgetInfeasible(
                f"the given schedule has a peak of {peak:,} bytes; the budget is {budget:,}", peak
            )
        return Solution(status=Status.FEASIBLE, schedule=schedule, solver="given")
    if budget is None:
        raise TypeError("give a budget (bytes, '8GiB', or a fraction such as 0.5) or a schedule")
    solution = _solve(options, problem, budget)
    if solution.schedule is None:
        smallest = simulate(problem, solution.smallest or smallest_peak(problem)).peak
        raise BudgetInfeasible(
            f"no plan within {budget:,} bytes: {solution.message or solution.status.value}; the "
            f"smallest peak found is {smallest:,} bytes",
            smallest,
        )
    return solution


def _solve(options: Options, problem: Problem, budget: int) -> Solution:
    names = [solver.name for solver in SOLVERS]
    if options.solver != "auto" or "auto" in names:
        solver = find_solver(options.solver)
        return run_solver(
            solver, problem, budget, time_limit_s=options.time_limit_s, seed=options.seed
        )
    best: Solution | None = None
    for name in ("keep-all", "sqrt", "floor"):
        found = run_solver(
            find_solver(name), problem, budget, time_limit_s=options.time_limit_s / 3, seed=0
        )
        if best is None or _rank(problem, found) < _rank(problem, best):
            best = found
    assert best is not None
    return best


def _rank(problem: Problem, solution: Solution) -> tuple[int, int]:
    if solution.schedule is not None:
        return 0, simulate(problem, solution.schedule).cost
    return 1, simulate(problem, solution.smallest).peak if solution.smallest else 1 << 62


def _call(loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = plain_forward(model)(*args, **kwargs)
        return out if loss_fn is None else loss_fn(out)

    return call
