"""`Plan`: a record (pure data) and, if a model of this process was captured, that capture.

A plan that was made and a plan that was read from a file are the same class: the latter has no
capture until `apply` makes one. `make_plan` and `manage_plan` are what `rekindle.api`, the
integrations and the command line call.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn

from rekindle.capture import JointGraph
from rekindle.core import Problem, Schedule, Status
from rekindle.core.budget import budget_of_bytes
from rekindle.errors import CaptureError, NothingToPlan, PlanMismatch, RekindleError
from rekindle.families import family_for, has_families, named_dims
from rekindle.frontend import Reading
from rekindle.pipeline import (
    Captured,
    capture_for,
    check_options,
    correct_plan,
    device_budget,
    plan_again,
    plan_call,
    recorded,
)
from rekindle.planning_progress import planning_shown
from rekindle.plans.options import DEFAULTS, OnMiss, Options, as_args
from rekindle.plans.plan_account import CURVE_LIMIT_S, account_of, with_step, write_report
from rekindle.plans.plan_files import read_plan, write_plan
from rekindle.plans.plan_record import PlanRecord
from rekindle.predict import DeviceBudget, Prediction, Predictor, StepMeasurement
from rekindle.predict.advice import advice
from rekindle.profile import Profile
from rekindle.program import Program
from rekindle.region_planning import plan_regions, region_of
from rekindle.report import Account, Step, explain, explain_module
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.managed_module import manage, plain_class, say, with_loss_args
from rekindle.runtime.plan_table import Manager
from rekindle.runtime.regions import Recording, Regions, has_parts
from rekindle.runtime.runner import Runner
from rekindle.runtime.step_watch import Excess
from rekindle.self_check import try_untested_torch
from rekindle.solve.pareto import Point, pareto
from rekindle.solving import NO_BUDGET

log = logging.getLogger("rekindle")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Plan:
    """A schedule for one model and one call signature, with its peak, cost and bound."""

    record: PlanRecord  # what a plan file contains
    captured: Captured | None = None  # None: read from a file and not applied yet

    def __str__(self) -> str:
        return str(self.record)

    def __repr__(self) -> str:
        # Not the fields: they are the whole problem, thousands of lines.
        return f"<Plan {self.record}>"

    # ---- of the record

    @property
    def problem(self) -> Problem:
        """The ops and values of a training step, with costs and sizes."""
        return self.record.problem

    @property
    def schedule(self) -> Schedule:
        """The ops in execution order, recomputations included."""
        return self.record.schedule

    @property
    def peak_bytes(self) -> int:
        """Simulated peak of a step, without what is resident (parameters, buffers, inputs)."""
        return self.record.peak_bytes

    @property
    def cost_ns(self) -> int:
        """Sum of the costs of all ops that run, recomputations included."""
        return self.record.cost_ns

    @property
    def keep_all_peak_bytes(self) -> int:
        """Peak memory of a step that recomputes nothing."""
        return self.record.keep_all_peak_bytes

    @property
    def keep_all_cost_ns(self) -> int:
        """Cost of a step that recomputes nothing."""
        return self.record.keep_all_cost_ns

    @property
    def overhead(self) -> float:
        """Cost increase over keep-all; 0.07 is 7 %."""
        return self.record.overhead

    @property
    def gap(self) -> str:
        """The optimality gap, as a sentence."""
        return self.record.gap

    @property
    def budget_bytes(self) -> int | None:
        """The most memory that a step may add to what is resident."""
        return self.record.budget_bytes

    @property
    def solver(self) -> str:
        """The solver that found the schedule."""
        return self.record.solver

    @property
    def status(self) -> Status:
        """OPTIMAL (proven) or FEASIBLE."""
        return self.record.status

    @property
    def bound(self) -> int | None:
        """Proven lower bound on the cost of any schedule within the budget, or None."""
        return self.record.bound

    @property
    def torch(self) -> str:
        """The torch release that the plan was made with and applies to."""
        return self.record.provenance.torch

    @property
    def rekindle(self) -> str:
        """The Rekindle release that the plan was made with."""
        return self.record.provenance.rekindle

    @property
    def device(self) -> str:
        """The device type that the plan was made for, such as "cuda"."""
        return self.record.provenance.device

    @property
    def graph(self) -> str:
        """Hash of the captured graph that the plan was made for."""
        return self.record.provenance.graph

    @property
    def costs_device(self) -> str:
        """Name of the device whose op costs were used."""
        return self.record.provenance.costs_device

    @property
    def costs(self) -> tuple[tuple[str, int], ...]:
        """Number of ops whose costs were measured, cached and estimated."""
        return self.record.provenance.costs

    @property
    def measured(self) -> bool:
        """Whether any cost was measured on a device."""
        return self.record.provenance.measured

    @property
    def seed(self) -> int:
        """Seed of the solver."""
        return self.record.options.seed

    @property
    def hold_outputs(self) -> bool:
        """Whether the caller is assumed to keep all outputs until the backward ends."""
        return self.record.options.hold_outputs

    @property
    def cuda_graph(self) -> bool:
        """Whether the step runs as a CUDA graph."""
        return self.record.options.cuda_graph

    @property
    def fuse(self) -> bool:
        """Whether chains of elementwise ops are fused on a GPU."""
        return self.record.options.fuse

    @property
    def offload(self) -> str | bool:
        """Whether values may be moved to host memory, as given."""
        return self.record.options.offload

    @property
    def moved_bytes(self) -> int:
        """What a step sends to host memory, and fetches again."""
        return self.record.moved_bytes

    @property
    def host_peak_bytes(self) -> int:
        """Most host memory that a step has at one time."""
        return self.record.host_peak_bytes

    @property
    def recompute(self) -> tuple[str, ...]:
        """Patterns of the ops to recompute, as given; `options.save` has those to save."""
        return tuple(self.record.options.recompute)

    def full(self) -> "Plan":
        """This plan; of a family's plan for one shape, the plan with its problem."""
        return self

    # ---- of what was captured

    def _captured(self) -> Captured:
        if self.captured is None:
            raise RekindleError(
                "this plan has no captured model: it was read from a file (call "
                "plan.apply(model, args) and use `plan` of the module that it returns), or is of a "
                "model in regions, whose parts are captured one by one"
            )
        return self.captured

    @property
    def joint(self) -> JointGraph:
        """The captured joint graph of forward and backward."""
        return self._captured().joint

    @property
    def program(self) -> Program:
        """The joint graph as ops over storages."""
        return self._captured().program

    @property
    def profile(self) -> Profile:
        """Cost, workspace and output sizes of each op, and how they were obtained."""
        return self._captured().profile

    @property
    def reading(self) -> Reading | None:
        """How the captured call was read: its guards, and what it does to Python objects."""
        return self._captured().reading

    @property
    def late_runner(self) -> LateRunner:
        """Makes the runner on first use."""
        return self._captured().late_runner

    @property
    def runner(self) -> Runner:
        """Executes the plan under autograd; made on first use."""
        return self.late_runner.get()

    @property
    def options(self) -> Options:
        """The options that the plan was made with; a plan file keeps some of them."""
        if self.captured is None:
            given = self.budget_bytes
            budget = None if given is None else budget_of_bytes(given)
            return replace(self.record.options, budget=budget)
        return self.captured.options

    @property
    def device_budget(self) -> DeviceBudget | None:
        """How `device_budget=` was divided into residents, headroom and step."""
        return None if self.captured is None else self.captured.device_budget

    @property
    def kept(self) -> bool:
        """Whether the schedule is from the cache of solutions."""
        return self.captured is not None and self.captured.kept

    # ---- files

    def made_by(self, command: str) -> "Plan":
        """The plan, with this command where reports say how to reproduce it."""
        made = replace(self.record.provenance, made_by=command)
        return replace(self, record=replace(self.record, provenance=made))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; `Plan.load` reads it."""
        write_plan(path, self.record)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Plan":
        """Reads a saved plan; raises FileError for a broken file. Use `apply` to run it."""
        return Plan(read_plan(path))

    # ---- running

    def apply(
        self,
        model: nn.Module,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        inplace: bool = False,
        on_miss: OnMiss = DEFAULTS.on_miss,
        on_stale: Literal["raise", "replan"] = "raise",
        loss_fn: Callable[..., Any] | None = None,
        loss_args: Sequence[Any] | None = None,
    ) -> nn.Module:
        """The managed model that runs this plan, for arguments like those it was planned with.
        Raises PlanMismatch for another graph, torch release or device; `on_stale="replan"` makes a
        new plan with the same budget, `save` and `recompute` instead. A plan file does not contain
        `loss_fn`: give it again, with `loss_args` like those of the plan's sample."""
        if on_stale not in ("raise", "replan"):
            raise ValueError(f"on_stale is {on_stale!r}; expected 'raise' or 'replan'")
        options = replace(self._options_with(loss_fn), on_miss=on_miss)
        args, kwargs = as_args(args), with_loss_args(model, kwargs, options.loss_fn, loss_args)
        try:
            plan = self.plan_for(model, args, kwargs, loss_fn=loss_fn)
        except PlanMismatch as error:
            if on_stale == "raise" or self.budget_bytes is None:
                raise
            log.warning("stale plan, planning again: %s", error)
            plan = make_plan(options, model, args, kwargs)
        return manage_plan(options, plan, model, args, kwargs, inplace=inplace)

    def plan_for(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Mapping[str, Any],
        *,
        loss_fn: Callable[..., Any] | None = None,
    ) -> "Plan":
        """This record with the given model's capture; raises PlanMismatch."""
        try_untested_torch(_managed)
        options = self._options_with(loss_fn)
        how = options
        if self.captured is None:  # the record has the costs: measure nothing
            how = replace(options, profile="estimate")
        captured = capture_for(self.record, how, model, as_args(args), kwargs)
        captured = replace(captured, options=options, device_budget=self.device_budget)
        return replace(self, captured=captured)

    def _options_with(self, loss_fn: Callable[..., Any] | None) -> Options:
        return self.options if loss_fn is None else replace(self.options, loss_fn=loss_fn)

    # ---- reports

    def predict(self) -> Prediction:
        """Predicted peak and time of a step on the device, as `rekindle.measure` measures them."""
        return self._predictor().predict(self.schedule)

    def _predictor(self) -> Predictor:
        has_arena = self.options.arena and not self.options.cuda_graph
        return Predictor(self.program, self.profile, self.problem, has_arena)

    def pareto(self, num_points: int = 12, time_limit_s: float = 60.0) -> tuple[Point, ...]:
        """The trade-off between memory and time, from the smallest peak to keep-all."""
        return pareto(
            self.problem,
            num_points=num_points,
            time_limit_s=time_limit_s,
            constraints=self.options.wishes,
        )

    def explain(self, module: str | None = None) -> str:
        """What is saved and recomputed, by module, and why; or a sentence on one module."""
        found = self.account()
        return explain(found) if module is None else explain_module(found, module)

    def report(
        self,
        path: str | os.PathLike[str] = "report.html",
        *,
        measured: StepMeasurement | None = None,
        time_limit_s: float = CURVE_LIMIT_S,
    ) -> Path:
        """Writes the report, one self-contained HTML file. `measured` is what `rekindle.measure`
        found. `time_limit_s` is for the trade-off curve; 0 leaves it out."""
        found = self.account()
        if measured is not None:
            found = with_step(found, measured=Step(measured.peak_bytes, measured.step_ns))
        return write_report(found, path, time_limit_s)

    def account(self, *, commands: Sequence[str] = ()) -> Account:
        """The data of all reports; `commands` are shown after the call that made the plan."""
        if self.captured is None:
            return account_of(self.record, commands=commands)
        predictor = self._predictor()
        predicted = predictor.predict(self.schedule)
        return account_of(
            self.record,
            commands=commands,
            made_for=self._made_for(),
            predicted=Step(predicted.peak_bytes, predicted.step_ns),
            advice=advice(predictor, self.schedule, self.budget_bytes, self.options.cuda_graph),
        )

    def _made_for(self) -> tuple[tuple[str, str], ...]:
        facts = [
            ("torch", torch.__version__),
            ("device", str(self.joint.device)),
            ("costs", self.profile.summary()),
        ]
        if self.device_budget is not None:
            facts.append(("device budget", str(self.device_budget)))
        return tuple(facts)


Planner = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Plan | None], Plan]


def make_plan(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    first: Plan | None = None,
) -> Plan:
    """A plan for one call; `first` is the plan of the same managed module's first call."""
    try_untested_torch(_managed)
    with planning_shown():
        record = None if first is None else first.record
        return Plan(*plan_call(options, model, args, kwargs, record))


def manage_plan(
    options: Options,
    first: Plan | CaptureError | None,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    inplace: bool = False,
    planner: Planner | None = None,
) -> nn.Module:
    """The module that runs the plan. `planner` makes plans for other calls, if `on_miss` asks. For
    a model that could not be captured, with the error in the place of a plan, its parts are
    planned."""
    max_plans = options.max_plans
    if options.on_miss not in ("eager", "replan", "raise"):
        raise ValueError(f"on_miss is {options.on_miss!r}; expected 'eager', 'replan' or 'raise'")
    if max_plans < 1:
        raise ValueError(f"max_plans is {max_plans}; expected 1 or more")
    if first is None and (options.budget, options.device_budget, options.schedule) == (None,) * 3:
        raise TypeError(NO_BUDGET)
    check_options(options)
    if first is not None:  # its costs are new; those of later plans may be kept ones
        options = replace(options, remeasure=False)
    manager = Manager(
        options.on_miss,
        planner or functools.partial(make_plan, options),
        functools.partial(_plan_again, options),
        functools.partial(recorded, options),
        options.loss_fn,
        functools.partial(_corrected, options),
        max_plans,
        functools.partial(family_for, options, Plan) if has_families(options) else None,
        named_dims(model, options.dynamic),
    )
    manager.in_regions = functools.partial(_in_regions, options, manager)
    if isinstance(first, Plan):
        manager.add(first, args, kwargs or {})
    managed = manage(model, manager, inplace)
    if isinstance(first, CaptureError):
        manager.regions = manager.in_regions(model, first)
    return managed


def _in_regions(
    options: Options, manager: Manager, model: nn.Module, error: CaptureError
) -> Regions:
    """For a model that is not planned in one piece; raises the error where it has no parts."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    if isinstance(error, NothingToPlan) or len(devices) > 1 or not has_parts(model):
        raise error
    if options.schedule is not None or options.wishes or options.cuda_graph:
        raise CaptureError(
            f"{error}; in parts it could be planned, but not with schedule=, save=, recompute= or "
            "cuda_graph=, which are for a model that is planned as a whole"
        )
    log.warning(
        "%s is planned in regions, from its first training step on, which is recorded and may "
        "exceed the budget: %s",
        plain_class(model).__name__,
        error,
    )

    def make(regions: Regions, recording: Recording) -> Plan:
        given = None
        if options.device_budget is not None:
            given = device_budget(options, model, (), {}, recording.device).step_bytes
        name = plain_class(model).__name__
        with planning_shown():
            return Plan(plan_regions(options, model, name, given, regions, recording))

    return Regions(
        str(error),  # the error itself holds the frames of what failed, and their tensors
        functools.partial(region_of, options),
        make,
        options.on_miss,
        functools.partial(say, manager),
    )


def _plan_again(
    options: Options,
    joint: JointGraph,
    old: Plan,
    tensors: Mapping[fx.Node, torch.Tensor] | None,
    *,
    same_ops: bool,
) -> Plan:
    return Plan(*plan_again(options, joint, old.record, tensors, old.device_budget, same_ops))


def _corrected(options: Options, old: Plan, seen: Excess | int, num_corrections: int) -> Plan:
    assert old.captured is not None
    return Plan(*correct_plan(options, old.record, old.captured, seen, num_corrections))


def _managed(options: Options, model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
    return manage_plan(options, make_plan(options, model, args, {}), model, args)
