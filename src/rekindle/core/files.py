"""Problem and schedule records <-> JSON: versioned, strict, written whole or not at all."""

import hashlib
import json
import os
from typing import Any, NoReturn

from rekindle.core.check import check_problem, check_schedule
from rekindle.core.disk import read_json, write_json
from rekindle.core.problem import HostLink, Op, Problem, Value
from rekindle.core.schedule import TRANSFER_KINDS, Schedule, Step, schedule_of
from rekindle.errors import FileError, InvalidProblem, InvalidSchedule, brief

PROBLEM_FORMAT = "rekindle.problem"
SCHEDULE_FORMAT = "rekindle.schedule"
VERSION = 1
TRANSFERS_VERSION = 2  # of a schedule that moves values: its steps are ops and transfers

# Which keys a record must and may have, and the types of each. type(), not isinstance: in JSON
# true is not a number.
_Keys = tuple[frozenset[str], dict[str, tuple[type, ...]]]


def _record_keys(required: dict[str, type], optional: dict[str, tuple[type, ...]]) -> _Keys:
    return frozenset(required), {k: (kind,) for k, kind in required.items()} | optional


_NULL = type(None)
_PROBLEM_KEYS = _record_keys(
    {
        "format": str,
        "version": int,
        "name": str,
        "cost_unit": str,
        "size_unit": str,
        "values": list,
        "ops": list,
        "resident": list,
        "outputs": list,
    },
    {"held": (list,), "pinned": (list,), "transfers": (dict, _NULL)},
)
_LINK_KEYS = _record_keys(
    {"to_host": int, "from_host": int, "latency": int, "least": int},
    {"host_budget": (int, _NULL), "serial": (bool,)},
)
_VALUE_KEYS = _record_keys({"name": str, "size": int}, {})
_OP_KEYS = _record_keys(
    {"name": str, "cost": int, "inputs": list, "outputs": list},
    {
        "workspace": (int,),
        "recomputable": (bool,),
        "inplace": (list,),
        "phase": (str, _NULL),
        "grad_of": (int, _NULL),
    },
)
_SCHEDULE_KEYS = _record_keys(
    {"format": str, "version": int, "problem": str, "ops": list},
    {"solver": (str,), "seed": (int,)},
)
_STEPS_KEYS = _record_keys(
    {"format": str, "version": int, "problem": str, "steps": list},
    {"solver": (str,), "seed": (int,)},
)


def problem_record(problem: Problem) -> dict[str, Any]:
    """The problem as JSON data; fields that equal their default are left out."""
    record: dict[str, Any] = {
        "format": PROBLEM_FORMAT,
        "version": VERSION,
        "name": problem.name,
        "cost_unit": problem.cost_unit,
        "size_unit": problem.size_unit,
        "values": [{"name": v.name, "size": v.size} for v in problem.values],
        "ops": [_op_record(op) for op in problem.ops],
        "resident": list(problem.resident),
        "outputs": list(problem.outputs),
    }
    # Left out where empty: files, and hashes, of problems without it are as they always were.
    if problem.held:
        record["held"] = list(problem.held)
    if problem.pinned:
        record["pinned"] = [list(pair) for pair in problem.pinned]
    if problem.transfers is not None:
        record["transfers"] = _link_record(problem.transfers)
    return record


def _link_record(link: HostLink) -> dict[str, Any]:
    record: dict[str, Any] = {
        "to_host": link.to_host,
        "from_host": link.from_host,
        "latency": link.latency,
        "least": link.least,
    }
    if link.host_budget is not None:
        record["host_budget"] = link.host_budget
    if link.serial:
        record["serial"] = True
    return record


def _op_record(op: Op) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": op.name,
        "cost": op.cost,
        "inputs": list(op.inputs),
        "outputs": list(op.outputs),
    }
    if op.workspace:
        record["workspace"] = op.workspace
    if not op.recomputable:
        record["recomputable"] = False
    if op.inplace:
        record["inplace"] = [list(pair) for pair in op.inplace]
    if op.phase is not None:
        record["phase"] = op.phase
    if op.grad_of is not None:
        record["grad_of"] = op.grad_of
    return record


def problem_hash(problem: Problem) -> str:
    """sha256 of the canonical JSON: UTF-8, sorted keys, no spaces, defaults left out."""
    # A schedule names its problem by this, so it must not change between releases: a field that is
    # added later is left out where it has its default.
    text = json.dumps(
        problem_record(problem), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def problem_from_record(record: Any, where: str = "the problem") -> Problem:
    """A checked Problem from JSON data; raises InvalidProblem or FileError with one sentence."""
    _kind(record, PROBLEM_FORMAT, where)
    _keys(record, _PROBLEM_KEYS, where)
    try:
        problem = Problem(
            values=tuple(_value(item, v) for v, item in enumerate(record["values"])),
            ops=tuple(_op(item, i) for i, item in enumerate(record["ops"])),
            resident=tuple(record["resident"]),
            outputs=tuple(record["outputs"]),
            held=tuple(record.get("held", ())),
            pinned=tuple(_pinned(pair) for pair in record.get("pinned", ())),
            name=record["name"],
            cost_unit=record["cost_unit"],
            size_unit=record["size_unit"],
            transfers=_link(record.get("transfers")),
        )
        check_problem(problem)
    except InvalidProblem as error:
        raise InvalidProblem(f"{where}: {error}") from None
    return problem


def _value(item: Any, value_id: int) -> Value:
    _keys(item, _VALUE_KEYS, "value", value_id)
    return Value(item["name"], item["size"])


def _pinned(pair: Any) -> tuple[int, int]:
    if type(pair) is not list or len(pair) != 2 or any(type(n) is not int for n in pair):
        _fail("a pinned pair must be [value, op], a value id and an op id")
    return pair[0], pair[1]


def _link(item: Any) -> HostLink | None:
    if item is None:
        return None
    _keys(item, _LINK_KEYS, "transfers")
    return HostLink(
        to_host=item["to_host"],
        from_host=item["from_host"],
        latency=item["latency"],
        least=item["least"],
        host_budget=item.get("host_budget"),
        serial=item.get("serial", False),
    )


def _op(item: Any, op_id: int) -> Op:
    _keys(item, _OP_KEYS, "op", op_id)
    # The only nested list: its elements have no key of their own that `_keys` could check.
    pairs = item.get("inplace", ())
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2 or any(type(v) is not int for v in pair):
            _fail(f"op {op_id}: an inplace pair must be [input, output], two value ids")
    return Op(
        name=item["name"],
        cost=item["cost"],
        inputs=tuple(item["inputs"]),
        outputs=tuple(item["outputs"]),
        workspace=item.get("workspace", 0),
        recomputable=item.get("recomputable", True),
        inplace=tuple((pair[0], pair[1]) for pair in pairs),
        phase=item.get("phase"),
        grad_of=item.get("grad_of"),
    )


def schedule_record(
    problem: Problem, schedule: Schedule, solver: str = "", seed: int = 0
) -> dict[str, Any]:
    """The schedule as JSON data, of version 1 where it has no transfers: every release reads it."""
    moves = bool(schedule.transfers)
    record: dict[str, Any] = {
        "format": SCHEDULE_FORMAT,
        "version": TRANSFERS_VERSION if moves else VERSION,
        "problem": problem_hash(problem),  # ids are positions, and mean nothing elsewhere
        "solver": solver,
        "seed": seed,
    }
    if moves:
        record["steps"] = [s if isinstance(s, int) else list(s) for s in schedule.steps]
    else:
        record["ops"] = list(schedule.ops)
    return record


def schedule_from_record(record: Any, problem: Problem, where: str = "the schedule") -> Schedule:
    """The schedule, if it was made for this problem and names its ops. Validity is not checked."""
    found = _kind(record, SCHEDULE_FORMAT, where, (VERSION, TRANSFERS_VERSION))
    moves = found == TRANSFERS_VERSION
    try:
        _keys(record, _STEPS_KEYS if moves else _SCHEDULE_KEYS, where)
    except InvalidProblem as error:  # `_keys` serves both formats
        raise InvalidSchedule(str(error)) from None
    # Ids are positions: of another problem they would be other ops, and perhaps valid.
    if record["problem"] != problem_hash(problem):
        raise InvalidSchedule(
            f"{where} was made for another problem (its problem hash is "
            f"{record['problem'][:12]!r}, this problem's is {problem_hash(problem)[:12]!r}); "
            "solve this problem again"
        )
    if moves:
        steps = enumerate(record["steps"])
        return schedule_of([_step(item, step, problem, where) for step, item in steps])
    # Ids are checked here, where the file can be named; the rest is `check_schedule`'s.
    for step, op in enumerate(record["ops"]):
        if type(op) is not int or not 0 <= op < len(problem.ops):
            raise InvalidSchedule(
                f"{where}: step {step} names op {brief(op)}, and the problem has ops 0 to "
                f"{len(problem.ops) - 1}"
            )
    return Schedule(tuple(record["ops"]))


def _step(item: Any, step: int, problem: Problem, where: str) -> Step:
    """An op id, or a transfer as [kind, value id]."""
    if type(item) is int and 0 <= item < len(problem.ops):
        return item
    if type(item) is not list:
        raise InvalidSchedule(
            f"{where}: step {step} is {_short(item)}; expected an op, 0 to {len(problem.ops) - 1}, "
            "or a transfer, [kind, value]"
        )
    if len(item) != 2 or item[0] not in TRANSFER_KINDS:
        raise InvalidSchedule(
            f"{where}: step {step} is no transfer; expected [kind, value], the kind one of "
            f"{', '.join(TRANSFER_KINDS)}"
        )
    kind, value_id = item
    if type(value_id) is not int or not 0 <= value_id < len(problem.values):
        raise InvalidSchedule(
            f"{where}: step {step} moves value {_short(value_id)}, and the problem has values 0 to "
            f"{len(problem.values) - 1}"
        )
    return kind, value_id


def read_problem(path: str | os.PathLike[str]) -> Problem:
    """A problem file, checked."""
    return problem_from_record(read_json(path), str(path))


def read_schedule(path: str | os.PathLike[str], problem: Problem) -> Schedule:
    """A schedule file, if it was made for this problem; `check_schedule` says if it can be run."""
    return schedule_from_record(read_json(path), problem, str(path))


def write_problem(path: str | os.PathLike[str], problem: Problem) -> None:
    """Checks a problem and writes it."""
    check_problem(problem)
    write_json(path, problem_record(problem))


def write_schedule(
    path: str | os.PathLike[str],
    problem: Problem,
    schedule: Schedule,
    solver: str = "",
    seed: int = 0,
) -> None:
    """Checks a schedule and writes it, with the solver that found it."""
    check_schedule(problem, schedule)
    write_json(path, schedule_record(problem, schedule, solver, seed))


def _kind(record: Any, expected: str, where: str, versions: tuple[int, ...] = (VERSION,)) -> int:
    """The version of a file of the expected format."""
    if type(record) is not dict:
        raise FileError(f"{where} is not a {expected} file: expected a JSON object")
    if record.get("format") != expected:
        raise FileError(
            f"{where} has format {brief(record.get('format'))!r}; expected {expected!r}"
        )
    found = record.get("version")
    # A newer version may mean something else by the same keys: nothing is guessed.
    if type(found) is not int or found not in versions:
        known = " and ".join(str(v) for v in versions)
        raise FileError(
            f"{where} has version {brief(found)}; this release reads "
            f"version{'s' if len(versions) > 1 else ''} {known}"
        )
    return found


def _keys(record: Any, keys: _Keys, where: str, position: int | None = None) -> None:
    """The record has the keys it must, no unknown ones, and values of the right types."""
    required, kinds = keys
    # The usual case first and without a word built: a file has tens of thousands of records.
    if type(record) is dict and required <= record.keys():
        for key, x in record.items():
            if type(x) not in kinds.get(key, ()):
                break
        else:
            return
    if position is not None:
        where = f"{where} {position}"
    if type(record) is not dict:
        _fail(f"{where} must be a JSON object")
    # In the order of the format, so that the same file gives the same sentence each time.
    for key in kinds:
        if key in required and key not in record:
            _fail(f"{where}: the key {key!r} is missing")
    for key, x in record.items():
        if key not in kinds:
            _fail(f"{where}: the key {brief(key)!r} is unknown; expected {', '.join(kinds)}")
        if type(x) not in kinds[key]:
            names = " or ".join(_NAMES[kind] for kind in kinds[key])
            _fail(f"{where}: {key!r} is {_short(x)}; expected {names}")


def _short(x: Any) -> str:
    """A piece of the JSON that was read, as JSON, in a few characters."""
    if type(x) in (list, dict) and x:
        return "a list" if type(x) is list else "an object"
    return brief(json.dumps(x))


_NAMES = {
    str: "a string",
    int: "a whole number",
    list: "a list",
    bool: "true or false",
    _NULL: "null",
}


def _fail(sentence: str) -> NoReturn:
    raise InvalidProblem(sentence)
