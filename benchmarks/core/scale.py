"""Two claims about scale: a schedule of one million steps over 100,000 ops simulates in under a
second, and a problem file of 10,000 ops loads and is checked in under half a second.

    python benchmarks/core/scale.py          # prints, and writes scale.json beside this file

Times are those of this process on its one core (other processes do not count), medians of several
runs. The first simulation over a problem includes handing it to the native core.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rekindle.core import (
    Problem,
    Schedule,
    check_problem,
    check_schedule,
    keep_all,
    read_problem,
    simulate,
    write_problem,
)
from rekindle.core.generate import random_layered, random_problem, random_schedule, transformer

RUNS = 7


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def copy(problem: Problem) -> Problem:
    """The same problem, not yet handed to the native core."""
    factory, arguments = problem.__reduce__()
    fresh: Problem = factory(*arguments)
    return fresh


def simulation() -> dict[str, Any]:
    problem = random_problem(1, 100_000)
    check_problem(problem)
    schedule = Schedule(random_schedule(problem, 0, repeats=0.9).ops)
    while len(schedule) < 1_000_000:
        schedule = Schedule(schedule.ops + schedule.ops[-1:] * (1_000_000 - len(schedule)))
    check_schedule(problem, schedule)
    copies = [copy(problem) for _ in range(RUNS)]
    first = median(seconds(partial(simulate, fresh, schedule)) for fresh in copies)
    again = median(seconds(lambda: simulate(problem, schedule)) for _ in range(RUNS))
    return {
        "ops": len(problem.ops),
        "steps": len(schedule),
        "first_s": round(first, 3),
        "again_s": round(again, 3),
        "limit_s": 1.0,
    }


def loading(problem: Problem) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.json"
        write_problem(path, problem)
        size = path.stat().st_size
        load = median(seconds(lambda: read_problem(path)) for _ in range(RUNS))
    keep = median(seconds(lambda: simulate(problem, keep_all(problem))) for _ in range(RUNS))
    return {
        "problem": problem.name,
        "ops": len(problem.ops),
        "values": len(problem.values),
        "bytes": size,
        "load_and_check_s": round(load, 3),
        "simulate_keep_all_s": round(keep, 4),
        "limit_s": 0.5,
    }


def main() -> None:
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}",
        # Loading first: a heap full of other problems would slow the garbage collector down.
        "loading": [loading(random_layered(10_000)), loading(transformer(455))],
        "simulation": simulation(),
    }
    text = json.dumps(result, indent=2)
    print(text)
    Path(__file__).with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    assert result["simulation"]["first_s"] < 1.0
    assert all(entry["load_and_check_s"] < 0.5 for entry in result["loading"])


if __name__ == "__main__":
    main()
