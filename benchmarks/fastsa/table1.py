"""Table 1 of FastSA's paper: its 18 rows with our `fastsa`, one core, default settings.

    table1.py [SEEDS]        -> table1.md beside this file

Times are CPU seconds of one core (the machine may be shared); the paper's are wall seconds of one
core of a Xeon 8380.
"""

import sys
import time
from pathlib import Path

from rekindle.core import keep_all, read_problem, simulate
from rekindle.solve import run_solver
from rekindle.solve.anneal.fastsa import FastSA, Reorder

HERE = Path(__file__).parent
INSTANCES = HERE.parent.parent / "tests" / "instances"
# Cost increase in per cent and seconds at 90, 80, 70 %; None: over budget in the paper.
PAPER = {
    "RL1": ((0.0, 11.7), (0.3, 11.5), (None, 12.0)),
    "RL2": ((0.0, 15.1), (0.0, 15.0), (2.6, 14.5)),
    "RL3": ((0.03, 21.0), (2.3, 20.9), (None, 21.2)),
    "RL4": ((0.4, 36.0), (2.5, 36.3), (7.4, 36.5)),
    "CM1": ((0.1, 9.4), (0.1, 9.7), (3.0, 9.7)),
    "CM2": ((0.2, 10.9), (0.4, 10.9), (0.8, 11.0)),
}


def main() -> None:
    num_seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    lines = [
        "# FastSA's Table 1: cost increase in %",
        "",
        f"Made by `table1.py {num_seeds}`: default `fastsa`, one thread, {num_seeds} seeds.",
        "Seconds are CPU seconds, mean over the seeds; every schedule is within the budget.",
        "",
        "| graph | budget % | paper | s | ours, median | best | worst | peak % | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in PAPER.items():
        problem = read_problem(INSTANCES / f"{name}.json")
        whole = simulate(problem, keep_all(problem))
        for percent, (paper, paper_s) in zip((90, 80, 70), rows, strict=True):
            budget = whole.peak * percent // 100
            found = []
            begun = time.process_time()
            for seed in range(num_seeds):
                solution = run_solver(FastSA(), problem, budget, seed=seed, time_limit_s=300)
                assert solution.schedule is not None, (name, percent, seed)
                trace = simulate(problem, solution.schedule)
                found.append((100 * (trace.cost / whole.cost - 1), 100 * trace.peak / whole.peak))
            seconds = (time.process_time() - begun) / num_seeds
            found.sort()
            middle = found[len(found) // 2]
            shown = "over budget" if paper is None else f"{paper:g}"
            lines.append(
                f"| {name} | {percent} | {shown} | {paper_s} | {middle[0]:.3f} | {found[0][0]:.3f} "
                f"| {found[-1][0]:.3f} | {middle[1]:.1f} | {seconds:.1f} |"
            )
            print(lines[-1], flush=True)
    lines += ["", "Order alone (`reorder`), smallest peak in % of keep-all:", ""]
    for name in PAPER:
        problem = read_problem(INSTANCES / f"{name}.json")
        whole = simulate(problem, keep_all(problem))
        begun = time.process_time()
        solution = run_solver(Reorder(), problem, 1, time_limit_s=60)
        assert solution.smallest is not None
        percent = 100 * simulate(problem, solution.smallest).peak / whole.peak
        seconds = time.process_time() - begun
        proven = ", proven: no order needs less" if solution.stopped_by == "proof" else ""
        lines.append(f"- {name}: {percent:.2f} in {seconds:.1f} s{proven}")
        print(lines[-1], flush=True)
    (HERE / "table1.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
