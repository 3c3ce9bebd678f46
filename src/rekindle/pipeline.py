"""Options + model + sample -> Plan: the line itself, one call per stage; what a plan can do."""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rekindle.capture import JointGraph, capture
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.core import (
    Problem,
    Schedule,
    Status,
    gap_sentence,
    is_fraction,
    keep_all,
    parse_budget,
    simulate,
)
from rekindle.errors import BudgetInfeasible, PlanMismatch
from rekindle.predict import (
    HEADROOM,
    DeviceBudget,
    Prediction,
    Predictor,
    StepMeasurement,
    residents_of,
)
from rekindle.predict import device_budget as device_budget_of
from rekindle.profile import Profile, ProfileListener, load_device, profile_nodes
from rekindle.program import Program, analyse
from rekindle.program.formulate import formulate
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.managed_module import Manager, OnMiss, captured_call, manage
from rekindle.runtime.runner import Runner
from rekindle.solve.base import Solver
from rekindle.solve.constraints import Wishes, wishes_of
from rekindle.solve.pareto import Point, pareto
from rekindle.solving import Choice, ScheduleSource, choose

if TYPE_CHECKING:
    from rekindle.plans.plan_files import StoredPlan

Budget = int | float | str
Patterns = str | Sequence[str]
Planner = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], "Plan | None"], "Plan"]
MAX_PLANS = 8


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
    late_runner: LateRunner
    kept: bool = False  # the schedule was found in an earlier run and kept on disk

    @property
    def runner(self) -> Runner:
        """What runs the plan; made the first time that it is asked for."""
        return self.late_runner.get()

    @property
    def overhead(self) -> float:
        """Cost increase over keep-all: 0.07 is 7 %."""
        if not self.keep_all_cost_ns:
            return 0.0
        return self.cost_ns / self.keep_all_cost_ns - 1

    @property
    def gap(self) -> str:
        """How far from the cheapest schedule this one can be, in a sentence."""
        return gap_sentence(self.cost_ns, self.bound)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; `Plan.load` reads it."""
        from rekindle.plans.plan_files import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "StoredPlan":
        """A plan that was saved: its numbers, and `apply`. A broken file is refused."""
        from rekindle.plans.plan_files import load_plan

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
        return pareto(
            self.problem,
            num_points=num_points,
            time_limit_s=time_limit_s,
            wishes=self.options.wishes,
        )

    def explain(self, module: str | None = None) -> str:
        """What is saved and what runs again, by module and why; or one module in a sentence."""
        from rekindle.plans.plan_account import explain_plan

        return explain_plan(self, module)

    def report(
        self,
        path: str | os.PathLike[str] = "report.html",
        *,
        measured: StepMeasurement | None = None,
        time_limit_s: float = 20.0,
    ) -> Path:
        """Writes the report page: one HTML file that opens offline. `measured` is what
        `rekindle.measure` found for the managed model; `time_limit_s` goes into the trade-off
        curve, and 0 leaves it out."""
        from rekindle.plans.plan_account import report_plan

        return report_plan(self, path, measured, time_limit_s)


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is to be made; kept by a managed module that plans again."""

    budget: Budget | None = None
    solver: str | Solver = "auto"
    time_limit_s: float = 60.0
    seed: int = 0
    profile: Literal["estimate", "measure"] = "measure"
    loss_fn: Callable[..., Any] | None = None
    schedule: ScheduleSource | None = None
    device_budget: Budget | None = None
    headroom: float | int | str = HEADROOM
    optimizer: torch.optim.Optimizer | str | None = None
    device_profile: str | None = None
    on_progress: ProfileListener | None = None
    hold_outputs: bool = True
    save: Patterns = ()
    recompute: Patterns = ()
    cache: bool = True
    ranks: int = 1
    cuda_graph: bool = False
    fuse: bool = True

    @property
    def wishes(self) -> Wishes:
        return wishes_of(self.save, self.recompute)

    @property
    def choice(self) -> Choice:
        return Choice(
            self.solver, self.time_limit_s, self.seed, self.wishes, self.schedule, self.cache
        )


def manage_plan(
    options: Options,
    first: Plan | None,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inplace: bool,
    on_miss: OnMiss,
    max_plans: int = MAX_PLANS,
    planner: Planner | None = None,
) -> nn.Module:
    """The module that runs the plan, and plans again (by `planner`) as `on_miss` says."""
    if on_miss not in ("eager", "replan", "raise"):
        raise ValueError(f"on_miss is {on_miss!r}; expected 'eager', 'replan' or 'raise'")
    if max_plans < 1:
        raise ValueError(f"max_plans is {max_plans}; a managed module keeps one plan or more")
    if first is None and (options.budget, options.device_budget, options.schedule) == (None,) * 3:
        raise TypeError("give a budget (bytes, '8GiB', or a fraction such as 0.5) or a schedule")
    manager = Manager(
        on_miss,
        planner or functools.partial(make_plan, options),
        functools.partial(plan_again, options),
        options.loss_fn,
        max_plans,
    )
    if first is not None:
        manager.add(model, first, args, kwargs)
    return manage(model, manager, inplace)


def make_plan(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    first: Plan | None = None,
) -> Plan:
    """`first`: the plan that the same module has for its first kind of call. A fraction is one of
    this call's own keep-all peak, but gives no less than that plan's budget: a smaller batch, of
    which gradients are a larger share, has what the first one had."""
    joint = capture(model, args, kwargs, call=captured_call(options.loss_fn), fuse=options.fuse)
    given = None
    if options.device_budget is not None:
        given = device_budget(options, model, args, kwargs, joint.device)
    at_least = 0
    if first is not None and is_fraction(options.budget):
        at_least = first.budget_bytes or 0
    return plan_joint(options, joint, type(model).__name__, given, at_least)


def device_budget(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> DeviceBudget:
    """What the device's budget leaves for one step."""
    assert options.device_budget is not None
    if options.budget is not None:
        raise TypeError("give budget (of a step) or device_budget (of the device), not both")
    residents = residents_of(model, (args, dict(kwargs)), options.optimizer, options.ranks)
    described = options.device_profile and load_device(options.device_profile).memory_bytes
    return device_budget_of(
        options.device_budget, device, residents, options.headroom, described or None
    )


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
    options: Options,
    joint: JointGraph,
    name: str,
    given: DeviceBudget | None = None,
    at_least: int = 0,
) -> Plan:
    if options.cuda_graph and joint.device.type != "cuda":
        raise ValueError(f"cuda_graph=True needs a CUDA device; the model is on {joint.device}")
    description = None if options.device_profile is None else load_device(options.device_profile)
    with collector_at_rest():
        program = analyse(joint, hold_outputs=options.hold_outputs, random_once=options.cuda_graph)
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
            budget = max(at_least, parse_budget(options.budget, predictor.keep_all_bytes))
        solution, kept = choose(options.choice, predictor, budget)
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
        late_runner=LateRunner(program, problem, solution.schedule, options.cuda_graph),
        kept=kept,
    )
