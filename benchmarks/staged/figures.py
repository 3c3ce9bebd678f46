"""checkmate and moccasin on the published instances, against the published figures.

    python benchmarks/staged/figures.py [--time-limit S] [SOLVER:NAME:PERCENT ...]

Writes `figures.json` beside itself. `wall_best_s` is when the best schedule was there; `cpu_s` is
the processor time of the whole solve (wall times on a busy machine say little: 2 cores for 2
minutes are 240 s of it). `listed_optimum` is true where the figure is proven for the listed order.
"""

import argparse
import json
import os
from pathlib import Path

from rekindle.core import keep_all, read_problem, simulate
from rekindle.solve import find_solver, listen, run_solver
from rekindle.solve.backends.cpsat import _Worker

HERE = Path(__file__).parent
INSTANCES = HERE.parents[1] / "tests" / "instances"
PUBLISHED = {  # cost increase in %, by percent of the keep-all peak (Moccasin, Table 3)
    "checkmate": {"RL1": {90: 0.8, 80: 2.3}, "CM1": {90: 0.0, 80: 0.1}, "CM2": {90: 0.1}},
    "moccasin": {
        "RL1": {90: 0.8, 80: 2.3},
        "RL2": {90: 0.9, 80: 4.9},
        "RL3": {90: 0.7, 80: 3.4},
        "RL4": {90: 0.7, 80: 3.4},
        "CM1": {90: 0.0, 80: 0.1},
        "CM2": {90: 0.2, 80: 0.3},
    },
}


def cpu_s() -> float:
    _Worker.close_idle()  # a child counts once it has ended
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(solver: str, name: str, percent: int, time_limit_s: float) -> dict:
    problem = read_problem(INSTANCES / f"{name}.json")
    whole = simulate(problem, keep_all(problem))
    budget = whole.peak * percent // 100
    best = []

    def hear(progress):
        if progress.cost is not None and (not best or progress.cost < best[-1][0]):
            best.append((progress.cost, progress.elapsed_s))

    before = cpu_s()
    with listen(hear):
        solution = run_solver(find_solver(solver), problem, budget, time_limit_s=time_limit_s)
    found = solution.schedule and simulate(problem, solution.schedule)
    return {
        "solver": solver,
        "instance": name,
        "budget_percent": percent,
        "published_percent": PUBLISHED.get(solver, {}).get(name, {}).get(percent),
        "cost_increase_percent": found and round(100 * (found.cost / whole.cost - 1), 4),
        "bound_percent": solution.bound and round(100 * (solution.bound / whole.cost - 1), 4),
        "peak_percent": found and round(100 * found.peak / whole.peak, 2),
        "listed_optimum": solution.status.name == "OPTIMAL",
        "stopped_by": solution.stopped_by,
        "wall_best_s": round(best[-1][1], 1) if best else None,
        "wall_s": round(solution.wall_s, 1),
        "cpu_s": round(cpu_s() - before, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--time-limit", type=float, default=120)
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    cases = [case.split(":") for case in options.cases] or [
        (solver, name, percent)
        for solver, instances in PUBLISHED.items()
        for name, percents in instances.items()
        for percent in percents
    ]
    path = HERE / "figures.json"
    results = json.loads(path.read_text()) if path.exists() else []
    for solver, name, percent in cases:
        row = measure(solver, name, int(percent), options.time_limit)
        print(json.dumps(row), flush=True)
        key = ("solver", "instance", "budget_percent")
        results = [old for old in results if any(old[k] != row[k] for k in key)] + [row]
        results.sort(key=lambda r: tuple(str(r[k]) for k in key))
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
