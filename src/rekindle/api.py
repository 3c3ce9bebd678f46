"""`plan` and `rematerialize`: the line itself, one call per stage."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
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
from rekindle.errors import BudgetInfeasible, PlanMismatch
from rekindle.formulate import formulate
from rekindle.lower.module import Manager, OnMiss, manage, plain_forward
from rekindle.lower.run import Runner
from rekindle.profile import (
    HEADROOM,
    DeviceBudget,
    Prediction,
    Predictor,
    Profile,
    ProfileListener,
    load_device,
    profile_nodes,
    residents_of,
)
from rekindle.profile import device_budget as device_budget_of
from rekindle.solve.base import Solver, run_solver
from rekindle.solve.pareto import Point, pareto
from rekindle.solve.registry import SOLVERS, find_solver
from rekindle.solve.smallest import min_budget

if TYPE_CHECKING:
    from rekindle.stored import StoredPlan

Budget = int | float | str
ScheduleSource = Schedule | Callable[[Problem], Schedule]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Plan:
    """A schedule for one model and one kind of call, with what it costs."""

    joint: JointGraph
    program: Program
    problem: Problem
    schedule: Schedule
    peak_bytes: int  # simulated, above what is resident
    cost_ns: int  # the sum over all ops that run, repeats included
    keep_all_peak_bytes: int  # when nothing is recomputed
    keep_all_cost_ns: int
    budget_bytes: int | None
    solver: str  # the one that found the schedule
    status: Status  # OPTIMAL (proven) or FEASIBLE
    bound: int | None  # no schedule within the budget costs less, where that is known
    profile: Profile  # the cost of each op, and how it was obtained
    device_budget: DeviceBudget | None  # the sum behind `device_budget=`
    options: "Options"
    runner: Runner

    @property
    def overhead(self) -> float:
        """Cost increase over keep-all: 0.07 is 7 %."""
        if not self.keep_all_cost_ns:
            return 0.0
        return self.cost_ns / self.keep_all_cost_ns - 1

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; `Plan.load` reads it."""
        from rekindle.stored import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "StoredPlan":
        """A plan that was saved: its numbers, and `apply`. A broken file is refused."""
        from rekindle.stored import load_plan

        return load_plan(path)

    def apply(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        inplace: bool = False,
        on_miss: OnMiss = "eager",
    ) -> nn.Module:
        """The managed model that runs this plan; `args` as it was planned with."""
        given = replace(self.options, schedule=self.schedule)
        again = make_plan(given, model, args, kwargs or {})
        same_ops = [op.name for op in again.problem.ops] == [op.name for op in self.problem.ops]
        if not same_ops or again.problem.values != self.problem.values:
            raise PlanMismatch("the plan was made for another model or other inputs; plan again")
        return manage_plan(self.options, again, model, args, kwargs or {}, inplace, on_miss)

    def predict(self) -> Prediction:
        """The peak and the time of a step on the device, as `measure` would find them."""
        return Predictor(self.program, self.profile, self.problem).predict(self.schedule)

    def pareto(self, num_points: int = 12, time_limit_s: float = 60.0) -> tuple[Point, ...]:
        """What each amount of memory costs in time, from the smallest peak to keep-all."""
        return pareto(self.problem, num_points=num_points, time_limit_s=time_limit_s)


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
    device_budget: Budget | None = None
    headroom: float | int | str = HEADROOM
    optimizer: torch.optim.Optimizer | str | None = None
    device_profile: str | None = None
    on_progress: ProfileListener | None = None
    hold_outputs: bool = True
    cuda_graph: bool = False


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: Budget | None = None,
    solver: str | Solver = "auto",
    time_limit_s: float = 60.0,
    seed: int = 0,
    profile: Literal["estimate", "measure"] = "measure",
    loss_fn: Callable[..., Any] | None = None,
    schedule: ScheduleSource | None = None,
    device_budget: Budget | None = None,
    headroom: float | int | str = HEADROOM,
    optimizer: torch.optim.Optimizer | str | None = None,
    device_profile: str | None = None,
    on_progress: ProfileListener | None = None,
    hold_outputs: bool = True,
    cuda_graph: bool = False,
) -> Plan:
    """A plan for `model(*args, **kwargs)` within the budget; the model itself does not run.

    `budget` counts what a step adds to what is resident; `device_budget` the whole device ("auto":
    what is free now), of which the residents (with the state of `optimizer`, one that exists or a
    name such as "adamw") and the `headroom` are taken off. `device_profile` names a device
    description to plan for instead of this machine. `hold_outputs=False` takes it that the caller
    drops all outputs but the loss before the backward, as `model(...).loss.backward()` does.
    `cuda_graph=True` records the step and replays it: no time between kernels, and the memory of
    the step stays reserved.
    """
    options = Options(
        budget,
        solver,
        time_limit_s,
        seed,
        profile,
        loss_fn,
        schedule,
        device_budget,
        headroom,
        optimizer,
        device_profile,
        on_progress,
        hold_outputs,
        cuda_graph,
    )
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
    profile: Literal["estimate", "measure"] = "measure",
    inplace: bool = False,
    on_miss: OnMiss = "eager",
    loss_fn: Callable[..., Any] | None = None,
    schedule: ScheduleSource | None = None,
    device_budget: Budget | None = None,
    headroom: float | int | str = HEADROOM,
    optimizer: torch.optim.Optimizer | str | None = None,
    device_profile: str | None = None,
    on_progress: ProfileListener | None = None,
    hold_outputs: bool = True,
    cuda_graph: bool = False,
) -> nn.Module:
    """The same model, whose step never needs more than the budget; options as for `plan`."""
    options = Options(
        budget,
        solver,
        time_limit_s,
        seed,
        profile,
        loss_fn,
        schedule,
        device_budget,
        headroom,
        optimizer,
        device_profile,
        on_progress,
        hold_outputs,
        cuda_graph,
    )
    first = make_plan(options, model, args, kwargs or {})
    return manage_plan(options, first, model, args, kwargs or {}, inplace, on_miss)


def manage_plan(
    options: Options,
    first: Plan,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inplace: bool,
    on_miss: OnMiss,
) -> nn.Module:
    """The module that runs the plan, and plans again as `on_miss` says."""
    if on_miss not in ("eager", "replan", "raise"):
        raise ValueError(f"on_miss is {on_miss!r}; expected 'eager', 'replan' or 'raise'")
    manager = Manager(
        on_miss,
        functools.partial(make_plan, options),
        functools.partial(plan_again, options),
        options.loss_fn,
    )
    manager.add(model, first, args, kwargs)
    return manage(model, manager, inplace)


def make_plan(
    options: Options, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Plan:
    joint = capture(model, args, kwargs, call=_call(options.loss_fn))
    given = None
    if options.device_budget is not None:
        if options.budget is not None:
            raise TypeError("give budget (of a step) or device_budget (of the device), not both")
        residents = residents_of(model, (args, dict(kwargs)), options.optimizer)
        described = options.device_profile and load_device(options.device_profile).memory_bytes
        given = device_budget_of(
            options.device_budget, joint.device, residents, options.headroom, described or None
        )
    return plan_joint(options, joint, type(model).__name__, given)


def plan_again(options: Options, joint: JointGraph, old: Plan, *, same_ops: bool) -> Plan:
    """A plan for other gradients than the old one's; its schedule serves if the ops are the same
    and the budget still holds."""
    if same_ops:
        with contextlib.suppress(BudgetInfeasible):
            again = replace(options, schedule=old.schedule)
            kept = plan_joint(again, joint, old.problem.name, old.device_budget)
            return replace(kept, solver=old.solver)
    return plan_joint(options, joint, old.problem.name, old.device_budget)


def plan_joint(
    options: Options, joint: JointGraph, name: str, given: DeviceBudget | None = None
) -> Plan:
    if options.cuda_graph and joint.device.type != "cuda":
        raise ValueError(f"cuda_graph=True needs a CUDA device; the model is on {joint.device}")
    program = analyse(joint, hold_outputs=options.hold_outputs, random_once=options.cuda_graph)
    description = None if options.device_profile is None else load_device(options.device_profile)
    profile = profile_nodes(
        joint.nodes,
        joint.device,
        how=options.profile,
        description=description,
        on_progress=options.on_progress,
    )
    problem = formulate(program, profile, name)
    everything = simulate(problem, keep_all(problem))
    predictor = Predictor(program, profile, problem)
    budget = None if given is None else given.step_bytes
    if options.budget is not None:
        budget = parse_budget(options.budget, predictor.peak_bytes(keep_all(problem)))
    solution = _schedule(options, predictor, budget)
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
        profile=profile,
        device_budget=given,
        options=options,
        runner=Runner(program, solution.schedule, options.cuda_graph),
    )


def _schedule(options: Options, predictor: Predictor, budget: int | None) -> Solution:
    given, problem = options.schedule, predictor.problem
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
    solution = _solve_as_allocated(options, predictor, budget)
    if solution.schedule is None:
        smallest = simulate(problem, solution.smallest or min_budget(problem)).peak
        raise BudgetInfeasible(
            f"no plan within {budget:,} bytes: {solution.message or solution.status.value}; the "
            f"smallest peak found is {smallest:,} bytes",
            smallest,
        )
    return solution


def _solve_as_allocated(options: Options, predictor: Predictor, budget: int) -> Solution:
    """A schedule within the budget as the device's allocator will count it: where blocks turn out
    larger than their requests, the excess is taken off the solver's budget."""
    problem = predictor.problem
    whole, simulated = predictor.peak_bytes(keep_all(problem)), simulate(problem, keep_all(problem))
    if whole <= budget or not simulated.peak:
        target = budget
    else:
        target = budget * simulated.peak // whole
    for _ in range(4):
        solution = _solve(options, problem, target)
        if solution.schedule is None:
            return solution
        excess = predictor.peak_bytes(solution.schedule) - budget
        if excess <= 0:
            return solution
        target -= excess + budget // 500
    return dataclasses.replace(
        solution, schedule=None, smallest=solution.schedule, status=Status.INFEASIBLE
    )


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
