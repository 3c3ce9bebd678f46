"""Plan files: PlanRecord <-> JSON.

JSON and not a pickle: reading a plan file runs no code. A file that contradicts itself is refused
when it is read. One that was made for another model, torch release or device is refused when it is
applied (`Plan.apply`). Save, load, apply and save again gives the same file.
"""

import os
from collections.abc import Mapping
from typing import Any

from rekindle.core import Status
from rekindle.core.disk import read_json, write_json
from rekindle.core.files import (
    problem_from_record,
    problem_record,
    schedule_from_record,
    schedule_record,
)
from rekindle.errors import FileError, brief
from rekindle.plans.options import DEFAULTS, Options
from rekindle.plans.plan_record import KEPT_OPTIONS, PlanRecord, Provenance, Source

FORMAT = "rekindle.plan"
VERSION = 1  # raised when a reader of the old version would misread a new file
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
# At the top level of the file. The seed stands in the record of the schedule, where a schedule file
# without a plan has it too.
_OPTIONS = tuple(name for name in KEPT_OPTIONS if name != "seed")
_LATER = ("offload",)  # options that files of earlier releases do not have


def write_plan(path: str | os.PathLike[str], plan: PlanRecord) -> None:
    """Writes the record of a plan as JSON."""
    write_json(path, plan_to_json(plan))


def plan_to_json(plan: PlanRecord) -> dict[str, Any]:
    """The record as JSON data, in the order in which a file has it."""
    made = plan.provenance
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "rekindle": made.rekindle,
        "torch": made.torch,
        "device": made.device,
        "graph": made.graph,
        "costs": {"device": made.costs_device, **dict(made.costs)},
        **{
            name: _plain(getattr(plan.options, name))
            for name in _OPTIONS
            if name not in _LATER or getattr(plan.options, name) != getattr(DEFAULTS, name)
        },
        "status": plan.status.name,
        "problem": problem_record(plan.problem),
        "schedule": schedule_record(plan.problem, plan.schedule, plan.solver, plan.options.seed),
    }
    # Absent rather than null; readers accept both. Plan files of 0.1 have none of these.
    if made.made_by:
        data["made_by"] = made.made_by
    if made.inputs:
        data["inputs"] = dict(made.inputs)
    if made.residents:
        data["residents"] = dict(made.residents)
    if made.device_bytes is not None:
        data["device_bytes"] = made.device_bytes
    if plan.bound is not None:
        data["bound"] = plan.bound
    if plan.budget_bytes is not None:
        data["budget"] = plan.budget_bytes
    return data


def _plain(option: Any) -> Any:
    return list(option) if isinstance(option, tuple) else option


def read_plan(path: str | os.PathLike[str]) -> PlanRecord:
    """The record of a plan file. No code of the file is run: it is JSON, and checked."""
    return plan_from_json(read_json(path), str(path))


def plan_from_json(data: Any, where: str) -> PlanRecord:
    """A checked record from JSON data; raises FileError or InvalidSchedule with one sentence."""
    _check_keys(data, where)
    costs = _costs(data["costs"], where)
    problem = problem_from_record(data["problem"], f"{where}: problem")
    schedule = schedule_from_record(data["schedule"], problem, f"{where}: schedule")
    options = {name: data[name] for name in _OPTIONS if name in data}
    options |= {name: tuple(data[name]) for name in ("save", "recompute")}
    plan = PlanRecord(  # refuses a schedule that cannot be executed
        problem=problem,
        schedule=schedule,
        status=Status[data["status"]],
        bound=data.get("bound"),
        budget_bytes=data.get("budget"),
        solver=str(data["schedule"].get("solver", "")),
        options=Options(seed=int(data["schedule"].get("seed", 0)), **options),
        provenance=Provenance(
            torch=data["torch"],
            rekindle=data["rekindle"],
            device=data["device"],
            graph=data["graph"],
            costs_device=data["costs"]["device"],
            costs=costs,
            **_circumstances(data, where),
        ),
    )
    # A solver never gives these; an edited file might.
    if plan.budget_bytes is not None and plan.peak_bytes > plan.budget_bytes:
        raise FileError(
            f"{where}: the schedule needs {plan.peak_bytes:,} bytes and the plan's budget is "
            f"{brief(plan.budget_bytes)}; make a new plan"
        )
    if plan.bound is not None and not 0 <= plan.bound <= plan.cost_ns:
        raise FileError(
            f"{where}: 'bound' is {brief(plan.bound)}; expected 0 to the schedule's cost, "
            f"{plan.cost_ns}"
        )
    return plan


def _check_keys(data: Any, where: str) -> None:
    if type(data) is not dict or data.get("format") != FORMAT:
        raise FileError(f"{where} is not a plan file: expected format {FORMAT!r}")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise FileError(
            f"{where} has version {brief(data.get('version'))}; this release reads {VERSION}"
        )
    for key, kind in _KEYS.items():
        # `type(...) is`, since True is an instance of int.
        if type(data.get(key)) is not kind:
            raise FileError(f"{where}: {key!r} is missing or not a {kind.__name__}")
    for key in ("budget", "bound"):
        if data.get(key) is not None and type(data[key]) is not int:
            raise FileError(f"{where}: {key!r} is not a whole number")
    if type(data.get("offload", False)) not in (bool, str):
        raise FileError(f"{where}: 'offload' is neither false nor a text")
    for key in ("save", "recompute"):
        if any(type(pattern) is not str or not pattern.strip() for pattern in data[key]):
            raise FileError(
                f"{where}: {key!r} has an entry that is not a pattern, a non-empty string"
            )
    if data["status"] not in ("OPTIMAL", "FEASIBLE"):
        raise FileError(
            f"{where}: 'status' is {data['status'][:40]!r}; expected OPTIMAL or FEASIBLE"
        )


def _circumstances(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a report says about how a plan was made; a file may leave any of it out."""
    found: dict[str, Any] = {}
    for key, kind in (("made_by", str), ("device_bytes", int)):
        if data.get(key) is not None:
            if type(data[key]) is not kind:
                raise FileError(f"{where}: {key!r} is not a {kind.__name__}")
            found[key] = data[key]
    for key, kind in (("inputs", str), ("residents", int)):
        given = data.get(key) or {}
        if type(given) is not dict or any(type(x) is not kind for x in given.values()):
            raise FileError(f"{where}: {key!r} is not an object of names and {kind.__name__}s")
        found[key] = tuple(given.items())
    return found


def _costs(data: Mapping[str, Any], where: str) -> tuple[tuple[str, int], ...]:
    """How often each source of costs occurs, in the file's order; the device beside them is a
    name."""
    counts = {name: count for name, count in data.items() if name != "device"}
    known = {source.value for source in Source}
    if type(data.get("device")) is not str or not counts.keys() <= known:
        raise FileError(
            f"{where}: 'costs' must have a 'device' and otherwise only {', '.join(sorted(known))}"
        )
    if any(type(count) is not int or count < 0 for count in counts.values()):
        raise FileError(f"{where}: a count in 'costs' is not a whole number of 0 or more")
    return tuple(counts.items())
