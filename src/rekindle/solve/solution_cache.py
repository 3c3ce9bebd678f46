"""Solutions on disk, so that what was solved before is there at once.

One JSON file per request: the problem by its hash (costs, and with them the device, included), the
budget, the solver with its options, the seed, the constraints and the release of Rekindle. A
file appears by one rename, whole or not at all: a killed writer leaves at most a temporary file,
which a later one sweeps away, and of two writers the later wins. A reader believes nothing: what is
not understood counts as absent, and a schedule must pass the simulation within the budget before it
is used.

A solution that its time limit ended serves only who gives no more time than it had.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.core import (
    Problem,
    Schedule,
    Solution,
    Status,
    Transfer,
    problem_hash,
    simulate,
)
from rekindle.core.disk import cache_home, own_version, read_json, write_json
from rekindle.core.schedule import TRANSFER_KINDS
from rekindle.errors import RekindleError
from rekindle.solve.base import Solver

FORMAT = "rekindle.solution"
VERSION = 1
MAX_SOLUTIONS = 512  # files; the least recently used go first
_ABANDONED_AFTER_S = 3600.0  # a temporary file of that age has no writer any more
# Compared by exact type: to isinstance a bool is an int, and a file that says `true` where a number
# belongs was not written by us.
_FIELDS = {
    "key": dict,
    "status": str,
    "ops": list,
    "solver": str,
    "stopped_by": str,
    "wall_s": float,
    "time_limit_s": float,
    "notes": list,
}


def solutions_dir() -> Path:
    """The folder of cached solutions."""
    return cache_home() / "solutions"


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """What was asked of a solver; equal questions have equal answers, but for the time given."""

    problem: Problem
    budget: int
    solver: Solver
    seed: int
    constraints: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def key(self) -> dict[str, Any]:
        # All that an answer depends on but the time limit, which `_read_record` weighs. The repr of
        # a solver names all its options. Another release may search in another way.
        return {
            "format": FORMAT,
            "version": VERSION,
            "rekindle": own_version(),
            "problem": problem_hash(self.problem),
            "budget": self.budget,
            "solver": repr(self.solver),
            "seed": self.seed,
            "wishes": [list(patterns) for patterns in self.constraints],
        }

    @property
    def cacheable(self) -> bool:
        """A solver that is a plain dataclass tells all its options by its repr."""
        return dataclasses.is_dataclass(self.solver)

    def path(self, key: dict[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True, separators=(",", ":"))
        # 128 bits name the file; the whole key stands in it and is compared, so that a collision
        # would be a miss and no wrong answer.
        return solutions_dir() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def lookup(request: SolveRequest, time_limit_s: float) -> Solution | None:
    """The kept answer, simulated anew, or None."""
    if not request.cacheable:
        return None
    key = request.key
    path = request.path(key)
    try:
        record = read_json(path)
    except RekindleError:
        return None
    solution = _read_record(request, key, record, time_limit_s)
    if solution is not None:
        with contextlib.suppress(OSError):
            os.utime(path)  # used just now
    return solution


def solutions_of(request: SolveRequest) -> list[Schedule]:
    """Schedules that are kept for the request's problem and constraints, whatever their budget,
    solver or seed; each is simulated before it is given out."""
    wanted = {name: request.key[name] for name in ("format", "version", "problem", "wishes")}
    found = []
    for path in _files():
        with contextlib.suppress(RekindleError):
            record = read_json(path)
            key = record.get("key") if type(record) is dict else None
            if type(key) is not dict or any(key.get(k) != v for k, v in wanted.items()):
                continue
            schedule = _schedule(record)
            if schedule is not None:
                simulate(request.problem, schedule)  # raises where it cannot be executed
                found.append(schedule)
    return found


def _files() -> list[Path]:
    try:
        return list(solutions_dir().glob("*.json"))
    except OSError:
        return []


def _read_record(
    request: SolveRequest, key: dict[str, Any], record: Any, time_limit_s: float
) -> Solution | None:
    if type(record) is not dict or record.get("key") != key:
        return None
    if any(type(record.get(name)) is not kind for name, kind in _FIELDS.items()):
        return None
    bound = record.get("bound")
    if bound is not None and type(bound) is not int:
        return None
    status = Status.__members__.get(record["status"])
    if status not in (Status.OPTIMAL, Status.FEASIBLE):
        return None
    # With more time than it had, that search would have gone on; a proof stays one.
    in_time = record["stopped_by"] == "time limit" and record["time_limit_s"] < time_limit_s
    if in_time and status is not Status.OPTIMAL:
        return None
    schedule = _schedule(record)
    if schedule is None:
        return None
    try:
        trace = simulate(request.problem, schedule)
    except RekindleError:
        return None
    if trace.peak > request.budget or (bound is not None and bound > trace.cost):
        return None
    return Solution(
        status=status,
        schedule=schedule,
        solver=record["solver"],
        seed=request.seed,
        wall_s=record["wall_s"],
        bound=bound,
        stopped_by=record["stopped_by"],
        notes=tuple(str(note) for note in record["notes"]),
    )


def _schedule(record: dict[str, Any]) -> Schedule | None:
    """The schedule of a file, if it can be one; files before transfers have ops alone."""
    ops, moves = record.get("ops"), record.get("transfers", [])
    if type(ops) is not list or any(type(op) is not int for op in ops) or type(moves) is not list:
        return None
    transfers = []
    before = 0
    for row in moves:
        if type(row) is not list or len(row) != 3 or row[0] not in TRANSFER_KINDS:
            return None
        if any(type(n) is not int for n in row[1:]) or not before <= row[2] <= len(ops):
            return None
        transfers.append(Transfer(*row))
        before = row[2]
    return Schedule(tuple(ops), tuple(transfers))


def store(request: SolveRequest, solution: Solution, time_limit_s: float) -> None:
    """Writes the answer down; gives up in silence where nothing can be written."""
    if solution.schedule is None or solution.stopped_by == "interrupt" or not request.cacheable:
        return
    key = request.key
    path = request.path(key)
    record = {
        "key": key,
        "status": solution.status.name,
        "ops": list(solution.schedule.ops),
        "transfers": [[t.kind, t.value_id, t.before] for t in solution.schedule.transfers],
        "solver": solution.solver,
        "bound": solution.bound,
        "stopped_by": solution.stopped_by,
        "wall_s": float(solution.wall_s),
        "time_limit_s": float(time_limit_s),
        "notes": list(solution.notes),
    }
    # A full disk or a home that cannot be written to costs the next call its time, nothing else.
    with contextlib.suppress(OSError, RekindleError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
        _sweep(path.parent)


def _sweep(folder: Path) -> None:
    """Removes what writers that were killed have left, and the least recently used solutions."""
    now = time.time()
    kept: list[tuple[float, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            # Other processes sweep too: what was listed a moment ago may be gone.
            age = path.stat().st_mtime
            if path.suffix == ".json":
                kept.append((age, path))
            elif now - age > _ABANDONED_AFTER_S:
                path.unlink()
    # The oldest first: `lookup` renews the time of what it finds.
    kept.sort()
    for _, path in kept[: max(0, len(kept) - MAX_SOLUTIONS)]:
        path.unlink(missing_ok=True)


def solutions_info() -> tuple[int, int]:
    """How many solutions are kept, and their bytes."""
    sizes = []
    with contextlib.suppress(OSError):
        sizes = [path.stat().st_size for path in solutions_dir().glob("*.json")]
    return len(sizes), sum(sizes)


def solutions_clear() -> int:
    """Forgets all solutions; returns how many there were."""
    removed = 0
    with contextlib.suppress(OSError):
        for path in list(solutions_dir().iterdir()):
            removed += path.suffix == ".json"
            path.unlink(missing_ok=True)
    return removed
