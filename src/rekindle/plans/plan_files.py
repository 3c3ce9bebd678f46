"""A plan as a file: the problem, the schedule, and what they were made for.

JSON, never a pickle: a plan file runs no code. It is applied only to a model whose graph, captured
anew, is the one it was made for, with the same torch release and kind of device; where its costs
were measured, on the same device. A stale plan is refused with the reason, or made anew on request.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from rekindle.core import Problem, Schedule, Status, keep_all, simulate
from rekindle.core.files import (
    own_version,
    problem_from_record,
    problem_record,
    read_json,
    schedule_from_record,
    schedule_record,
    write_json,
)
from rekindle.errors import FileError, PlanMismatch, brief
from rekindle.pipeline import Options, Plan, make_plan, manage_plan
from rekindle.plans.plan_account import CURVE_LIMIT_S, explain_plan, report_plan
from rekindle.predict import StepMeasurement
from rekindle.profile import Source, device_name
from rekindle.program import Program
from rekindle.runtime.managed_module import OnMiss

FORMAT = "rekindle.plan"
VERSION = 1
_KEYS = {
    "format": str,
    "version": int,
    "rekindle": str,
    "torch": str,
    "device": str,
    "graph": str,
    "costs": dict,
    "hold_outputs": bool,
    "cuda_graph": bool,
    "fuse": bool,
    "save": list,
    "recompute": list,
    "status": str,
    "problem": dict,
    "schedule": dict,
}
log = logging.getLogger("rekindle")


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan read from a file: all its numbers, and `apply`."""

    problem: Problem
    schedule: Schedule
    solver: str
    seed: int
    status: Status
    bound: int | None
    torch: str
    rekindle: str
    device: str
    graph: str
    costs_device: str  # whose costs these are, by name
    costs: tuple[tuple[str, int], ...]  # how many ops were measured, cached, estimated
    hold_outputs: bool
    cuda_graph: bool
    fuse: bool
    budget_bytes: int | None
    save: tuple[str, ...]
    recompute: tuple[str, ...]

    @property
    def measured(self) -> bool:
        """Whether the costs are those of a real device."""
        return any(name != Source.ESTIMATED.value and count for name, count in self.costs)

    @property
    def peak_bytes(self) -> int:
        return simulate(self.problem, self.schedule).peak

    @property
    def cost_ns(self) -> int:
        return simulate(self.problem, self.schedule).cost

    @property
    def keep_all_peak_bytes(self) -> int:
        return simulate(self.problem, keep_all(self.problem)).peak

    @property
    def keep_all_cost_ns(self) -> int:
        return simulate(self.problem, keep_all(self.problem)).cost

    @property
    def overhead(self) -> float:
        base = self.keep_all_cost_ns
        return self.cost_ns / base - 1 if base else 0.0

    def explain(self, module: str | None = None) -> str:
        """As `Plan.explain`."""
        return explain_plan(self, module)

    def report(
        self,
        path: str | os.PathLike[str] = "report.html",
        *,
        measured: StepMeasurement | None = None,
        time_limit_s: float = CURVE_LIMIT_S,
    ) -> Path:
        """As `Plan.report`."""
        return report_plan(self, path, measured, time_limit_s)

    def apply(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        inplace: bool = False,
        on_miss: OnMiss = "eager",
        on_stale: Literal["raise", "replan"] = "raise",
        loss_fn: Callable[..., Any] | None = None,
    ) -> nn.Module:
        """The managed model; refused where the plan was made for another graph, torch or device, or
        with `on_stale="replan"` made anew for the same budget and wishes."""
        if on_stale not in ("raise", "replan"):
            raise ValueError(f"on_stale is {on_stale!r}; expected 'raise' or 'replan'")
        args, kwargs = tuple(args), dict(kwargs or {})
        options = Options(
            budget=self.budget_bytes,
            loss_fn=loss_fn,
            hold_outputs=self.hold_outputs,
            save=self.save,
            recompute=self.recompute,
            cuda_graph=self.cuda_graph,
            fuse=self.fuse,
        )
        try:
            plan = self.plan_for(model, args, kwargs, loss_fn=loss_fn)
        except PlanMismatch as error:
            if on_stale == "raise" or self.budget_bytes is None:
                raise
            log.warning("the plan is stale, and is made anew: %s", error)
            plan = make_plan(options, model, args, kwargs)
        return manage_plan(options, plan, model, args, kwargs, inplace, on_miss)

    def plan_for(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        loss_fn: Callable[..., Any] | None = None,
    ) -> Plan:
        """The plan as it was made, with this model's graph; raises PlanMismatch."""
        if self.torch != _release():
            raise PlanMismatch(
                f"the plan was made with torch {self.torch}, this is {_release()}; plan again"
            )
        where = {t.device.type for t in (*model.parameters(), *model.buffers())}
        if where and self.device not in where:
            raise PlanMismatch(
                f"the plan was made for {self.device}, the model is on {', '.join(sorted(where))}; "
                "plan again"
            )
        options = Options(
            profile="estimate",
            loss_fn=loss_fn,
            schedule=self._checked,
            hold_outputs=self.hold_outputs,
            cuda_graph=self.cuda_graph,
            fuse=self.fuse,
        )
        plan = make_plan(options, model, args, kwargs)
        device = plan.joint.device
        if device.type != self.device:
            raise PlanMismatch(
                f"the plan was made for {self.device}, the model is on {device}; plan again"
            )
        if self.measured and self.costs_device != device_name(device):
            raise PlanMismatch(
                f"the plan was measured on {self.costs_device}, this is {device_name(device)}: "
                "its kernels may need other memory; plan again"
            )
        if graph_hash(plan.problem, plan.program) != self.graph:
            raise PlanMismatch(
                "the plan was made for a model of the same ops and other sizes: other widths, "
                "input shapes or dtypes; plan again"
            )
        return replace(
            plan,
            problem=self.problem,
            peak_bytes=self.peak_bytes,
            cost_ns=self.cost_ns,
            keep_all_peak_bytes=self.keep_all_peak_bytes,
            keep_all_cost_ns=self.keep_all_cost_ns,
            budget_bytes=self.budget_bytes,
            solver=self.solver,
            status=self.status,
            bound=self.bound,
        )

    def _checked(self, problem: Problem) -> Schedule:
        if _structure(problem) != _structure(self.problem):
            raise PlanMismatch(
                f"the plan was made for another graph ({len(self.problem.ops)} ops, this model's "
                f"has {len(problem.ops)}): another model, input shape, dtype or mode; plan again"
            )
        return self.schedule


def _structure(problem: Problem) -> list[Any]:
    """What a problem is apart from its costs and the sizes of blocks, which vary by machine."""
    record = [
        [op.name, op.inputs, op.outputs, op.recomputable, op.inplace, op.phase]
        for op in problem.ops
    ]
    return [record, problem.resident, problem.outputs, problem.held]


def graph_hash(problem: Problem, program: Program) -> str:
    """The structure and the bytes of each storage, before any rounding to blocks."""
    text = json.dumps([_structure(problem), [v.size_bytes for v in program.values]])
    return hashlib.sha256(text.encode()).hexdigest()


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    write_json(path, plan_record(plan))


def plan_record(plan: Plan) -> dict[str, Any]:
    """The plan as JSON data."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "rekindle": own_version(),
        "torch": _release(),
        "device": plan.joint.device.type,
        "graph": graph_hash(plan.problem, plan.program),
        "costs": {
            "device": plan.profile.device,
            **{source.value: count for source, count in plan.profile.num_by_source.items()},
        },
        "hold_outputs": plan.program.held == plan.program.given,
        "cuda_graph": plan.options.cuda_graph,
        "fuse": plan.options.fuse,
        "save": list(plan.options.wishes.save),
        "recompute": list(plan.options.wishes.recompute),
        "status": plan.status.name,
        "problem": problem_record(plan.problem),
        "schedule": schedule_record(plan.problem, plan.schedule, plan.solver, plan.options.seed),
    }
    if plan.bound is not None:
        record["bound"] = plan.bound
    if plan.budget_bytes is not None:
        record["budget"] = plan.budget_bytes
    return record


def load_plan(path: str | os.PathLike[str]) -> StoredPlan:
    return stored_plan(read_json(path), str(path))


def stored_plan(record: Any, path: str) -> StoredPlan:
    """A checked plan from JSON data; raises FileError or InvalidSchedule with one sentence."""
    if type(record) is not dict or record.get("format") != FORMAT:
        raise FileError(f"{path} is not a plan file: expected format {FORMAT!r}")
    if type(record.get("version")) is not int or record["version"] != VERSION:
        raise FileError(
            f"{path} has version {brief(record.get('version'))}; this release reads {VERSION}"
        )
    for key, kind in _KEYS.items():
        if type(record.get(key)) is not kind:
            raise FileError(f"{path}: {key!r} is missing or not a {kind.__name__}")
    for key in ("budget", "bound"):
        if record.get(key) is not None and type(record[key]) is not int:
            raise FileError(f"{path}: {key!r} is not a whole number")
    for key in ("save", "recompute"):
        if any(type(pattern) is not str for pattern in record[key]):
            raise FileError(f"{path}: {key!r} holds what is no pattern")
    if record["status"] not in ("OPTIMAL", "FEASIBLE"):
        raise FileError(f"{path}: a plan is OPTIMAL or FEASIBLE, not {record['status'][:40]!r}")
    costs = _costs(record["costs"], path)
    problem = problem_from_record(record["problem"], f"{path}: problem")
    schedule = schedule_from_record(record["schedule"], problem, f"{path}: schedule")
    trace = simulate(problem, schedule)  # refuses a schedule that cannot be executed
    budget, bound = record.get("budget"), record.get("bound")
    if budget is not None and trace.peak > budget:
        raise FileError(
            f"{path}: the schedule needs {trace.peak:,} bytes and the plan's budget is "
            f"{brief(budget)}; plan again"
        )
    if bound is not None and not 0 <= bound <= trace.cost:
        raise FileError(f"{path}: the bound is {brief(bound)}, and the schedule costs {trace.cost}")
    return StoredPlan(
        problem=problem,
        schedule=schedule,
        solver=str(record["schedule"].get("solver", "")),
        seed=int(record["schedule"].get("seed", 0)),
        status=Status[record["status"]],
        bound=bound,
        torch=record["torch"],
        rekindle=record["rekindle"],
        device=record["device"],
        graph=record["graph"],
        costs_device=record["costs"]["device"],
        costs=costs,
        hold_outputs=record["hold_outputs"],
        cuda_graph=record["cuda_graph"],
        fuse=record["fuse"],
        budget_bytes=budget,
        save=tuple(record["save"]),
        recompute=tuple(record["recompute"]),
    )


def _costs(record: Mapping[str, Any], path: object) -> tuple[tuple[str, int], ...]:
    """How often each source of costs occurs; the device beside them is a name."""
    counts = {name: count for name, count in record.items() if name != "device"}
    known = {source.value for source in Source}
    if type(record.get("device")) is not str or not counts.keys() <= known:
        raise FileError(f"{path}: 'costs' does not say whose costs these are")
    if any(type(count) is not int or count < 0 for count in counts.values()):
        raise FileError(f"{path}: 'costs' counts ops in whole numbers")
    return tuple(sorted(counts.items()))


def _release() -> str:
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])
