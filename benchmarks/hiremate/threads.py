"""What a second core brings: parts worked on side by side, and HiGHS with two threads of its own.

    python benchmarks/hiremate/threads.py [PROBLEM.json] [--rounds 5]

Writes `threads.json` beside this file: seconds (wall; CPU of all threads) to make all options of
the hierarchy with one and with two workers, and to solve the program of the top level with one and
with two threads of HiGHS; medians over rounds in which the ways take turns, and the load of the
machine.
Without a problem it takes the 5-layer GPT that `capture.py` wrote.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rekindle.core import keep_all, read_problem, simulate
from rekindle.partition.hierarchy import HPartition
from rekindle.partition.layer_graph import layer_graph, read_layers
from rekindle.solve.base import without_dead_ops
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.hierarchy.level_milp import LevelModel
from rekindle.solve.hierarchy.tree import Tree, top_level

HERE = Path(__file__).parent


def timed(work: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    default = HERE.parents[1] / "build" / "hiremate" / "GPT-5.paper.json"
    parser.add_argument("problem", nargs="?", type=Path, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    problem, _ = without_dead_ops(read_problem(options.problem))
    budget = simulate(problem, keep_all(problem)).peak * 3 // 4
    layers = read_layers(problem)
    groups = HPartition().partition(layer_graph(problem, layers)).children
    recipe = HiRemate().recipe

    def tree(num_workers: int) -> Tree:
        return Tree(replace(recipe, num_workers=num_workers), problem, layers, 0, float("inf"))

    model = LevelModel(top_level(problem, tree(1).children(groups)), budget)
    ways: dict[str, Callable[[], object]] = {
        "1 worker": lambda: tree(1).children(groups),
        "2 workers": lambda: tree(2).children(groups),
        "HiGHS, 1 thread": lambda: model.solve(budget, time_limit_s=60.0, threads=1),
        "HiGHS, 2 threads": lambda: model.solve(budget, time_limit_s=60.0, threads=2),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, work in ways.items():
            seconds[name].append(timed(work))
            print(name, [round(s, 2) for s in seconds[name][-1]], flush=True)
    found: dict[str, object] = {
        name: {
            "wall_s": round(statistics.median(wall for wall, _ in taken), 2),
            "cpu_s": round(statistics.median(cpu for _, cpu in taken), 2),
        }
        for name, taken in seconds.items()
    }
    found |= {"problem": problem.name, "rounds": options.rounds}
    found |= {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
    print(found)
    (HERE / "threads.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
