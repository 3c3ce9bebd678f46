"""Plans that move values, made without a search: random valid transfers on any schedule."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from support.random_transfers import Inserting
from support.schedules import SCHEDULES

from rekindle.core import Problem, Schedule, check_schedule, schedule_of

OPTIONS = {"offload": "host_budget 1GiB"}
_TABLE = """
[tiny]
like = "LIKE"
title = "a device from which any value is moved"
host = { to_host = 1000000000, from_host = 1000000000, latency_ns = 10, least_bytes = 1, \
memory_slowdown = 0.0, compute_slowdown = 0.0 }
"""


def device_file(folder: Path, like: str = "cpu") -> str:
    """A description in which every value is worth a transfer."""
    path = folder / f"tiny-{like}.toml"
    path.write_text(_TABLE.replace("LIKE", like), encoding="utf-8")
    return str(path)


def moving(schedule: str, seed: int = 0, rate: float = 0.6) -> Callable[[Problem], Schedule]:
    """The schedule of that name, with values sent, dropped, fetched and released at random."""

    def made(problem: Problem) -> Schedule:
        assert problem.transfers is not None
        ops = SCHEDULES[schedule](problem).ops
        found = schedule_of(Inserting(problem, ops, Random(seed), rate).steps())
        check_schedule(problem, found)
        return found

    return made


def without_workspace(problem: Problem) -> Problem:
    return replace(problem, ops=tuple(replace(op, workspace=0) for op in problem.ops))
