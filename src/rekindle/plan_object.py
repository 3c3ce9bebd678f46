"""`Plan`: a record (pure data) and, for a model of this process, what was captured of it.

One class for a plan that was made and for one that was read from a file: the second has no capture
until `apply` gives it one. Also what makes plans and puts them into a managed module, from Options:
`rekindle.api`, the adapters and the command line all come through here.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rekindle.capture import JointGraph
from rekindle.core import Problem, Schedule, Status
from rekindle.errors import PlanMismatch, RekindleError
from rekindle.pipeline import Captured, capture_for, plan_again, plan_call, recorded
from rekindle.plans.options import DEFAULTS, OnMiss, Options
from rekindle.plans.plan_account import CURVE_LIMIT_S, account_of, with_step, write_report
from rekindle.plans.plan_files import read_plan, write_plan
from rekindle.plans.plan_record import PlanRecord
from rekindle.predict import DeviceBudget, Prediction, Predictor, StepMeasurement
from rekindle.predict.advice import advice
from rekindle.profile import Profile
from rekindle.program import Program
from rekindle.report import Account, Step, explain, explain_module
from rekindle.runtime.lazy_runner import LateRunner
from rekindle.runtime.managed_module import Manager, manage
from rekindle.runtime.runner import Runner
from rekindle.solve.pareto import Point, pareto

log = logging.getLogger("rekindle")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Plan:
    """A schedule for one model and one kind of call, with what it costs."""

    record: PlanRecord  # all of it that is data, and that a plan file holds
    captured: Captured | None = None  # None where it was read from a file and not applied yet

    # ---- of the record

    @property
    def problem(self) -> Problem:
        """The ops and values of a step, with their costs and sizes."""
        return self.record.problem

    @property
    def schedule(self) -> Schedule:
        """The ops in the order in which they run, repeats included."""
        return self.record.schedule

    @property
    def peak_bytes(self) -> int:
        """Simulated, above what is resident."""
        return self.record.peak_bytes

    @property
    def cost_ns(self) -> int:
        """The sum over all ops that run, repeats included."""
        return self.record.cost_ns

    @property
    def keep_all_peak_bytes(self) -> int:
        """When nothing is recomputed."""
        return self.record.keep_all_peak_bytes

    @property
    def keep_all_cost_ns(self) -> int:
        """When nothing is recomputed."""
        return self.record.keep_all_cost_ns

    @property
    def overhead(self) -> float:
        """Cost increase over keep-all: 0.07 is 7 %."""
        return self.record.overhead

    @property
    def gap(self) -> str:
        """How far from the cheapest schedule this one can be, in a sentence."""
        return self.record.gap

    @property
    def budget_bytes(self) -> int | None:
        """What a step may add to what is resident."""
        return self.record.budget_bytes

    @property
    def solver(self) -> str:
        """The one that found the schedule."""
        return self.record.solver

    @property
    def status(self) -> Status:
        """OPTIMAL (proven) or FEASIBLE."""
        return self.record.status

    @property
    def bound(self) -> int | None:
        """No schedule within the budget costs less, where that is known."""
        return self.record.bound

    @property
    def torch(self) -> str:
        """The release of torch that it was made with, and for."""
        return self.record.provenance.torch

    @property
    def rekindle(self) -> str:
        """The release of Rekindle that it was made with."""
        return self.record.provenance.rekindle

    @property
    def device(self) -> str:
        """The type of device that it was made for."""
        return self.record.provenance.device

    @property
    def graph(self) -> str:
        """A hash of the captured graph that it was made for."""
        return self.record.provenance.graph

    @property
    def costs_device(self) -> str:
        """Whose costs these are, by name."""
        return self.record.provenance.costs_device

    @property
    def costs(self) -> tuple[tuple[str, int], ...]:
        """How many ops were measured, cached, estimated."""
        return self.record.provenance.costs

    @property
    def measured(self) -> bool:
        """Whether the costs are those of a real device."""
        return self.record.provenance.measured

    @property
    def seed(self) -> int:
        """The seed of the search."""
        return self.record.options.seed

    @property
    def hold_outputs(self) -> bool:
        """Whether the caller is taken to keep all outputs through the backward."""
        return self.record.options.hold_outputs

    @property
    def cuda_graph(self) -> bool:
        """Whether the step is recorded and replayed."""
        return self.record.options.cuda_graph

    @property
    def fuse(self) -> bool:
        """Whether chains of elementwise ops on a GPU become one kernel."""
        return self.record.options.fuse

    @property
    def recompute(self) -> tuple[str, ...]:
        """What was asked to be recomputed, by pattern; `options.save` is what was to be saved."""
        return tuple(self.record.options.recompute)

    # ---- of what was captured

    def _captured(self) -> Captured:
        if self.captured is None:
            raise RekindleError(
                "this plan was read from a file and knows no model: give it one with "
                "plan.apply(model, args), and ask the managed model's `plan`"
            )
        return self.captured

    @property
    def joint(self) -> JointGraph:
        """The captured forward and backward."""
        return self._captured().joint

    @property
    def program(self) -> Program:
        """The graph as ops over storages."""
        return self._captured().program

    @property
    def profile(self) -> Profile:
        """The cost of each op, and how it was obtained."""
        return self._captured().profile

    @property
    def late_runner(self) -> LateRunner:
        """What makes the runner."""
        return self._captured().late_runner

    @property
    def runner(self) -> Runner:
        """What runs the plan; made the first time that it is asked for."""
        return self.late_runner.get()

    @property
    def options(self) -> Options:
        """How it was made; of a plan file, what the file keeps of that."""
        if self.captured is None:
            return replace(self.record.options, budget=self.budget_bytes)
        return self.captured.options

    @property
    def device_budget(self) -> DeviceBudget | None:
        """The sum behind `device_budget=`."""
        return None if self.captured is None else self.captured.device_budget

    @property
    def kept(self) -> bool:
        """The schedule was found in an earlier run and kept on disk."""
        return self.captured is not None and self.captured.kept

    # ---- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; `Plan.load` reads it."""
        write_plan(path, self.record)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Plan":
        """A plan that was saved: its numbers, and `apply`. A broken file is refused."""
        return Plan(read_plan(path))

    # ---- running

    def apply(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        inplace: bool = False,
        on_miss: OnMiss = DEFAULTS.on_miss,
        on_stale: Literal["raise", "replan"] = "raise",
        loss_fn: Callable[..., Any] | None = None,
    ) -> nn.Module:
        """The managed model that runs this plan; `args` as it was planned with. Refused where the
        plan was made for another graph, torch or device, or with `on_stale="replan"` made anew for
        the same budget and wishes. A plan file keeps no `loss_fn`: give it again."""
        if on_stale not in ("raise", "replan"):
            raise ValueError(f"on_stale is {on_stale!r}; expected 'raise' or 'replan'")
        args, kwargs = tuple(args), dict(kwargs or {})
        options = replace(self._options_with(loss_fn), on_miss=on_miss)
        try:
            plan = self.plan_for(model, args, kwargs, loss_fn=loss_fn)
        except PlanMismatch as error:
            if on_stale == "raise" or self.budget_bytes is None:
                raise
            log.warning("the plan is stale, and is made anew: %s", error)
            plan = make_plan(options, model, args, kwargs)
        return manage_plan(options, plan, model, args, kwargs, inplace=inplace)

    def plan_for(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        loss_fn: Callable[..., Any] | None = None,
    ) -> "Plan":
        """The same record with this model's graph; raises PlanMismatch."""
        options = self._options_with(loss_fn)
        how = options
        if self.captured is None:  # the costs that count are in the record: measure none again
            how = replace(options, profile="estimate")
        captured = capture_for(self.record, how, model, args, kwargs)
        captured = replace(captured, options=options, device_budget=self.device_budget)
        return replace(self, captured=captured)

    def _options_with(self, loss_fn: Callable[..., Any] | None) -> Options:
        return self.options if loss_fn is None else replace(self.options, loss_fn=loss_fn)

    # ---- telling

    def predict(self) -> Prediction:
        """The peak and the time of a step on the device, as `measure` would find them."""
        return self._predictor().predict(self.schedule)

    def _predictor(self) -> Predictor:
        return Predictor(self.program, self.profile, self.problem)

    def pareto(self, num_points: int = 12, time_limit_s: float = 60.0) -> tuple[Point, ...]:
        """What each amount of memory costs in time, from the smallest peak to keep-all."""
        return pareto(
            self.problem,
            num_points=num_points,
            time_limit_s=time_limit_s,
            constraints=self.options.wishes,
        )

    def explain(self, module: str | None = None) -> str:
        """What is saved and what runs again, by module and why; or one module in a sentence."""
        found = self.account()
        return explain(found) if module is None else explain_module(found, module)

    def report(
        self,
        path: str | os.PathLike[str] = "report.html",
        *,
        measured: StepMeasurement | None = None,
        time_limit_s: float = CURVE_LIMIT_S,
    ) -> Path:
        """Writes the report page: one HTML file that opens offline. `measured` is what
        `rekindle.measure` found for the managed model; `time_limit_s` goes into the trade-off
        curve, and 0 leaves it out."""
        found = self.account()
        if measured is not None:
            found = with_step(found, measured=Step(measured.peak_bytes, measured.step_ns))
        return write_report(found, path, time_limit_s)

    def account(self, *, commands: Sequence[str] = ()) -> Account:
        """What all reports print; `commands`: how one comes by the same plan again."""
        if self.captured is None:
            return account_of(self.record, commands=commands)
        predictor = self._predictor()
        predicted = predictor.predict(self.schedule)
        return account_of(
            self.record,
            commands=commands or (self._call(),),
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

    def _call(self) -> str:
        options = self.options
        solver = options.solver if isinstance(options.solver, str) else options.solver.name
        return (
            f"rekindle.plan(model, args, kwargs, budget={self.budget_bytes}, solver={solver!r}, "
            f"time_limit_s={options.time_limit_s:g}, seed={options.seed}, "
            f"profile={options.profile!r})"
        )


Planner = Callable[[nn.Module, Sequence[Any], Mapping[str, Any], Plan | None], Plan]


def make_plan(
    options: Options,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    first: Plan | None = None,
) -> Plan:
    """`first`: the plan that the same module has for its first kind of call."""
    return Plan(*plan_call(options, model, args, kwargs, None if first is None else first.record))


def manage_plan(
    options: Options,
    first: Plan | None,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    inplace: bool = False,
    planner: Planner | None = None,
) -> nn.Module:
    """The module that runs the plan, and plans again (by `planner`) as `on_miss` says."""
    max_plans = options.max_plans
    if options.on_miss not in ("eager", "replan", "raise"):
        raise ValueError(f"on_miss is {options.on_miss!r}; expected 'eager', 'replan' or 'raise'")
    if max_plans < 1:
        raise ValueError(f"max_plans is {max_plans}; a managed module keeps one plan or more")
    if first is None and (options.budget, options.device_budget, options.schedule) == (None,) * 3:
        raise TypeError("give a budget (bytes, '8GiB', or a fraction such as 0.5) or a schedule")
    manager = Manager(
        options.on_miss,
        planner or functools.partial(make_plan, options),
        functools.partial(_plan_again, options),
        functools.partial(recorded, options),
        options.loss_fn,
        max_plans,
    )
    if first is not None:
        manager.add(model, first, args, kwargs or {})
    return manage(model, manager, inplace)


def _plan_again(options: Options, joint: JointGraph, old: Plan, *, same_ops: bool) -> Plan:
    return Plan(*plan_again(options, joint, old.record, old.device_budget, same_ops))
