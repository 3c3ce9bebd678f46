"""A plan as a file: the problem, the schedule, and what they were made for.

JSON, never a pickle: a plan file runs no code. It is applied only to a model whose graph, captured
anew, is the one it was made for, with the same torch release and kind of device.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rekindle.api import Options, Plan, make_plan, manage_plan
from rekindle.capture import Program
from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.core.files import (
    problem_from_record,
    problem_record,
    read_json,
    schedule_from_record,
    schedule_record,
    write_json,
)
from rekindle.errors import FileError, PlanMismatch, brief
from rekindle.lower.module import OnMiss

FORMAT = "rekindle.plan"
VERSION = 1
_KEYS = {
    "format": str,
    "version": int,
    "torch": str,
    "device": str,
    "graph": str,
    "hold_outputs": bool,
    "problem": dict,
    "schedule": dict,
}


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan read from a file: all its numbers, and `apply`."""

    problem: Problem
    schedule: Schedule
    solver: str
    torch: str
    device: str
    graph: str
    hold_outputs: bool
    budget_bytes: int | None

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

    def apply(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        inplace: bool = False,
        on_miss: OnMiss = "eager",
    ) -> nn.Module:
        """The managed model; refused where the plan was made for another graph, torch or device."""
        if self.torch != _release():
            raise PlanMismatch(
                f"the plan was made with torch {self.torch}, this is {_release()}; plan again"
            )
        options = Options(
            budget=None,
            solver="auto",
            time_limit_s=60.0,
            seed=0,
            profile="estimate",
            loss_fn=None,
            schedule=self._checked,
            hold_outputs=self.hold_outputs,
        )
        plan = make_plan(options, model, args, kwargs or {})
        if plan.joint.device.type != self.device:
            raise PlanMismatch(
                f"the plan was made for {self.device}, the model is on {plan.joint.device}"
            )
        if graph_hash(plan.problem, plan.program) != self.graph:
            raise PlanMismatch(
                "the plan was made for a model of the same ops and other sizes: other widths, "
                "input shapes or dtypes; plan again"
            )
        return manage_plan(options, plan, model, args, kwargs or {}, inplace, on_miss)

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
    record: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "torch": _release(),
        "device": plan.joint.device.type,
        "graph": graph_hash(plan.problem, plan.program),
        "hold_outputs": plan.program.held == plan.program.given,
        "problem": problem_record(plan.problem),
        "schedule": schedule_record(plan.problem, plan.schedule, plan.solver),
    }
    if plan.budget_bytes is not None:
        record["budget"] = plan.budget_bytes
    write_json(path, record)


def load_plan(path: str | os.PathLike[str]) -> StoredPlan:
    record = read_json(path)
    if type(record) is not dict or record.get("format") != FORMAT:
        raise FileError(f"{path} is not a plan file: expected format {FORMAT!r}")
    if type(record.get("version")) is not int or record["version"] != VERSION:
        raise FileError(
            f"{path} has version {brief(record.get('version'))}; this release reads {VERSION}"
        )
    for key, kind in _KEYS.items():
        if type(record.get(key)) is not kind:
            raise FileError(f"{path}: {key!r} is missing or not a {kind.__name__}")
    budget = record.get("budget")
    if budget is not None and type(budget) is not int:
        raise FileError(f"{path}: 'budget' is not a whole number")
    problem = problem_from_record(record["problem"], f"{path}: problem")
    schedule = schedule_from_record(record["schedule"], problem, f"{path}: schedule")
    peak = simulate(problem, schedule).peak  # refuses a schedule that cannot be executed
    if budget is not None and peak > budget:
        raise FileError(
            f"{path}: the schedule needs {peak:,} bytes and the plan's budget is {brief(budget)}; "
            "plan again"
        )
    return StoredPlan(
        problem=problem,
        schedule=schedule,
        solver=str(record["schedule"].get("solver", "")),
        torch=record["torch"],
        device=record["device"],
        graph=record["graph"],
        hold_outputs=record["hold_outputs"],
        budget_bytes=budget,
    )


def _release() -> str:
    return ".".join(torch.__version__.split("+")[0].split(".")[:2])
