"""Moving values to the host beside recomputing them, on the problems captured from real models.

    python benchmarks/transfers/table.py [--limit 5] [--rate 55GB/s]
                                        # prints, and writes table.json beside this file

Three numbers for each problem and budget, as cost above keep-all: recomputation alone; the same
with as much memory more as the link carries while the forward runs, which is about the most that
moving values can give; and both together within the budget. Two claims: together is never worse
than recomputation alone, and at most two points above recomputation with the larger budget.
"""

import argparse
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rekindle.core import HostLink, Problem, Solution, keep_all, parse_rate, simulate
from rekindle.core.files import problem_from_record
from rekindle.solve import find_solver
from rekindle.solve.base import run_solver
from rekindle.solve.transfers import with_transfers

PROBLEMS = Path(__file__).parents[1] / "problems"
BUDGETS = (0.5, 0.3)
LATENCY_NS, LEAST_BYTES = 10_000, 2**20
POINTS = 2.0


def measure(problem: Problem, fraction: float, limit_s: float) -> dict[str, Any]:
    link, loss = problem.transfers, problem.loss_op
    assert link is not None
    assert loss is not None
    base = simulate(problem, keep_all(problem))
    budget = int(fraction * base.peak)
    carried = link.to_host * sum(op.cost for op in problem.ops[:loss]) // 10**9
    solver = find_solver("auto")
    alone = run_solver(solver, problem, budget, time_limit_s=limit_s)
    more = run_solver(solver, problem, budget + carried, time_limit_s=limit_s)
    both = with_transfers(solver, problem, budget, alone, time_limit_s=2 * limit_s)

    def percent(solution: Solution) -> float | None:
        if solution.schedule is None:
            return None
        return round(100 * (simulate(problem, solution.schedule).cost / base.cost - 1), 2)

    trace = None if both.schedule is None else simulate(problem, both.schedule)
    assert trace is None or trace.peak <= budget
    return {
        "budget": fraction,
        "recomputation": percent(alone),
        "with_the_links_bytes_more": percent(more),
        "both": percent(both),
        "bound": None if trace is None else round(100 * ((both.bound or 0) / base.cost - 1), 2),
        "carried_bytes": carried,
        "host_peak_bytes": trace and trace.host_peak,
        "wall_s": round(both.wall_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for recomputation alone")
    parser.add_argument("--rate", default="55GB/s", help="both ways")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    rate = parse_rate(arguments.rate)
    rows = []
    print(f"{'problem':26} budget   alone    more    both   bound  (% above keep-all)")
    for path in sorted(PROBLEMS.glob("*.json.gz")):
        name = path.name.removesuffix(".json.gz")
        if arguments.names and name not in arguments.names:
            continue
        problem = problem_from_record(json.loads(gzip.decompress(path.read_bytes())), name)
        problem = replace(problem, transfers=HostLink(rate, rate, LATENCY_NS, LEAST_BYTES))
        for fraction in BUDGETS:
            row = {"problem": name, **measure(problem, fraction, arguments.limit)}
            rows.append(row)
            keys = ("recomputation", "with_the_links_bytes_more", "both", "bound")
            cells = ("   none" if row[k] is None else f"{row[k]:7.2f}" for k in keys)
            print(f"{name:26} {fraction:6.1f} {' '.join(cells)}", flush=True)
    if not arguments.names:
        result = {"rate": rate, "limit_s": arguments.limit, "points": POINTS, "rows": rows}
        text = json.dumps(result, indent=1) + "\n"
        Path(__file__).with_suffix(".json").write_text(text, encoding="utf-8")
    for row in rows:
        if row["recomputation"] is not None:
            assert row["both"] <= row["recomputation"], row
            assert row["both"] <= row["with_the_links_bytes_more"] + POINTS, row


if __name__ == "__main__":
    main()
