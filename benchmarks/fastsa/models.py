"""Table 2 and the 23 models of D.5: problem files with unit costs, as `capture_models.py` writes.

    models.py FOLDER [SECONDS]       -> models.md beside this file

The paper's memory counts parameters and model inputs, so its budgets are fractions of resident +
peak; the same here. VGG-11 and ResNet-18 at the budgets of Table 2, the other 23 at 50 and 25 %.
"""

import math
import sys
import time
from pathlib import Path

from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.solve import run_solver
from rekindle.solve.fastsa import FastSA

HERE = Path(__file__).parent
# Recomputed ops of the paper: FastSA, Checkmate MILP; None: budget not met.
TABLE_2 = {
    "vgg11": {90: (2, 1), 80: (2, 2), 70: (None, None)},
    "resnet18": {90: (1, 1), 80: (5, 3), 70: (8, 4), 60: (9, 7), 50: (None, 8)},
}


def solve(problem: Problem, percent: int, limit_s: float) -> tuple[float, int, float, bool, float]:
    """Memory left and cost added as fractions, ops added, whether the budget was met, seconds."""
    whole = simulate(problem, keep_all(problem))
    resident = sum(problem.values[v].size for v in problem.resident)
    budget = max(1, (resident + whole.peak) * percent // 100 - resident)
    begun = time.process_time()
    solution = run_solver(FastSA(), problem, budget, time_limit_s=limit_s)
    seconds = time.process_time() - begun
    schedule = solution.schedule or solution.smallest
    assert schedule is not None
    trace = simulate(problem, schedule)
    memory = (resident + trace.peak) / (resident + whole.peak)
    added = trace.cost - whole.cost
    return memory, added, added / whole.cost, solution.schedule is not None, seconds


def table_2(folder: Path, limit_s: float) -> list[str]:
    lines = [
        "## Table 2: recomputed ops, unit costs",
        "",
        "| model | ops | budget % | FastSA's paper | Checkmate MILP | ours | memory % | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in TABLE_2.items():
        if not (folder / f"{name}.json").exists():
            continue
        problem = read_problem(folder / f"{name}.json")
        for percent, published in rows.items():
            memory, added, _, met, seconds = solve(problem, percent, limit_s)
            shown = " | ".join("not met" if n is None else str(n) for n in published)
            ours = str(added) if met else "not met"
            lines.append(
                f"| {name} | {len(problem.ops)} | {percent} | {shown} | {ours} "
                f"| {100 * memory:.1f} | {seconds:.1f} |"
            )
            print(lines[-1], flush=True)
    return lines


def all_models(folder: Path, limit_s: float) -> list[str]:
    lines = [
        "## Models of D.5: memory left and cost added, %",
        "",
        "Where a budget is not met, the smallest peak found and its cost.",
        "",
        "| model | ops | 50 %: memory | cost | s | 25 %: memory | cost | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    totals: dict[int, list[tuple[float, float]]] = {50: [], 25: []}
    for path in sorted(folder.glob("*.json")):
        if path.stem in TABLE_2:
            continue
        problem = read_problem(path)
        cells = []
        for percent in (50, 25):
            memory, _, overhead, met, seconds = solve(problem, percent, limit_s)
            totals[percent].append((memory, 1 + overhead))
            mark = "" if met else " (not met)"
            cells.append(f"{100 * memory:.1f}{mark} | {100 * overhead:.1f} | {seconds:.1f}")
        lines.append(f"| {path.stem} | {len(problem.ops)} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    cells = []
    for pairs in totals.values():
        memory, cost = (
            math.exp(sum(math.log(pair[k]) for pair in pairs) / max(1, len(pairs))) for k in (0, 1)
        )
        cells.append(f"{100 * memory:.1f} | {100 * (cost - 1):.1f} | ")
    lines.append(f"| geometric mean of {len(totals[50])} | | {' | '.join(cells)} |")
    lines.append("| FastSA's paper, 23 models | | all met | 7 | | 27 | 18 | |")
    print(*lines[-2:], sep="\n", flush=True)
    return lines


def main() -> None:
    folder = Path(sys.argv[1])
    limit_s = float(sys.argv[2]) if len(sys.argv) > 2 else 60.0
    lines = [
        "# Captured models",
        "",
        "Made by `models.py`: default `fastsa`, one thread, "
        f"time limit {limit_s:g} s; CPU seconds.",
        "The captured graphs have eager's own kernels as ops, views folded in; the paper's are of",
        "decomposed ops, so its numbers of nodes are larger.",
        "",
    ]
    lines += [*table_2(folder, limit_s), "", *all_models(folder, limit_s)]
    (HERE / "models.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
