"""Table 2 and the 23 models of D.5: problem files with unit costs, as `capture_models.py` writes.

    models.py table2 FOLDER            VGG-11 and ResNet-18, `checkmate` beside `fastsa`
    models.py d5 FOLDER [NAME ...]     the other models at 50 and 25 %

What was measured is kept in `models.json`, so that models can be done one by one; each call writes
`models.md` anew from all that is there. The paper's memory counts parameters and model inputs, so
its budgets are fractions of resident + peak; the same here.
"""

import json
import math
import sys
import time
from pathlib import Path

from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.solve import Solver, run_solver
from rekindle.solve.anneal.fastsa import FastSA
from rekindle.solve.staged.checkmate import Checkmate

HERE = Path(__file__).parent
KEPT = HERE / "models.json"
EXACT_S = 20.0  # for `checkmate`
# Recomputed ops of the paper: FastSA, Checkmate MILP; None: budget not met.
TABLE_2 = {
    "vgg11": {90: (2, 1), 80: (2, 2), 70: (None, None)},
    "resnet18": {90: (1, 1), 80: (5, 3), 70: (8, 4), 60: (9, 7), 50: (None, 8)},
}
HEAD = """# Captured models

Made by `models.py`: default `fastsa`, one thread; CPU seconds.
The captured graphs have eager's own kernels as ops, views folded in; the paper's are of
decomposed ops, so its numbers of nodes are larger.
"""


def solve(problem: Problem, percent: int, solver: Solver, limit_s: float) -> dict[str, object]:
    """What a solver reaches within a budget, or the smallest peak that it found."""
    whole = simulate(problem, keep_all(problem))
    resident = sum(problem.values[v].size for v in problem.resident)
    budget = max(1, (resident + whole.peak) * percent // 100 - resident)
    begun = time.process_time()
    solution = run_solver(solver, problem, budget, time_limit_s=limit_s)
    seconds = time.process_time() - begun
    found = solution.schedule or solution.smallest
    result: dict[str, object] = {"met": solution.schedule is not None, "s": round(seconds, 1)}
    result["ops"] = len(problem.ops)
    if solution.bound is not None:
        result["bound"] = solution.bound - whole.cost
    if found is not None:
        trace = simulate(problem, found)
        result["memory"] = (resident + trace.peak) / (resident + whole.peak)
        result["added"] = trace.cost - whole.cost
        result["overhead"] = trace.cost / whole.cost - 1
    return result


def shown(result: dict) -> str:
    if not result["met"]:
        return "not met"
    return str(result["added"])


def exact(result: dict) -> str:
    if not result["met"]:
        return "not met"
    proven = result.get("bound") == result["added"]
    return f"{result['added']}" + ("" if proven else f" (at least {result.get('bound', 0)})")


def table_2(kept: dict) -> list[str]:
    lines = [
        "## Table 2: recomputed ops, unit costs",
        "",
        f"`models.py table2 FOLDER`; our `checkmate` (listed order) has {EXACT_S:g} s of wall "
        "time; its",
        "proven bound is in brackets where it is not optimal.",
        "",
        "| model | ops | budget % | FastSA's paper | its Checkmate MILP | our `fastsa` | memory % "
        "| s | our `checkmate` | s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in TABLE_2.items():
        for percent, published in rows.items():
            ours = kept.get(f"{name} {percent} fastsa")
            other = kept.get(f"{name} {percent} checkmate")
            if ours is None or other is None:
                continue
            paper = " | ".join("not met" if n is None else str(n) for n in published)
            lines.append(
                f"| {name} | {ours['ops']} | {percent} | {paper} | {shown(ours)} "
                f"| {100 * ours['memory']:.1f} | {ours['s']} | {exact(other)} | {other['s']} |"
            )
    return lines


def all_models(kept: dict) -> list[str]:
    lines = [
        "## Models of D.5: memory left and cost added, %",
        "",
        "`models.py d5 FOLDER`. Where a budget is not met, the smallest peak found and its cost.",
        "",
        "| model | ops | 50 %: memory | cost | s | 25 %: memory | cost | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = sorted({key.split()[0] for key in kept} - TABLE_2.keys())
    totals: dict[int, list[tuple[float, float]]] = {50: [], 25: []}
    for name in names:
        cells = []
        for percent in (50, 25):
            result = kept[f"{name} {percent} fastsa"]
            totals[percent].append((result["memory"], 1 + result["overhead"]))
            mark = "" if result["met"] else " (not met)"
            memory, cost = 100 * result["memory"], 100 * result["overhead"]
            cells.append(f"{memory:.1f}{mark} | {cost:.1f} | {result['s']}")
        lines.append(f"| {name} | {kept[f'{name} 50 fastsa']['ops']} | {' | '.join(cells)} |")
    cells = []
    for pairs in totals.values():
        memory, cost = (
            math.exp(sum(math.log(pair[k]) for pair in pairs) / max(1, len(pairs))) for k in (0, 1)
        )
        cells.append(f"{100 * memory:.1f} | {100 * (cost - 1):.1f} | ")
    lines.append(f"| geometric mean of {len(names)} | | {' | '.join(cells)} |")
    lines.append("| FastSA's paper, 23 models | | all met | 7 | | 27 | 18 | |")
    return lines


def main() -> None:
    what, folder, *names = sys.argv[1:]
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if what == "table2":
        for name, rows in TABLE_2.items():
            problem = read_problem(Path(folder) / f"{name}.json")
            for percent in rows:
                for solver, limit_s in ((FastSA(), 60.0), (Checkmate(), EXACT_S)):
                    result = solve(problem, percent, solver, limit_s)
                    kept[f"{name} {percent} {solver.name}"] = result
                    print(name, percent, solver.name, result, flush=True)
    else:
        found = sorted(path.stem for path in Path(folder).glob("*.json"))
        for name in names or [name for name in found if name not in TABLE_2]:
            problem = read_problem(Path(folder) / f"{name}.json")
            for percent in (50, 25):
                result = solve(problem, percent, FastSA(), 60.0)
                kept[f"{name} {percent} fastsa"] = result
                print(name, percent, result, flush=True)
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    lines = [HEAD, *table_2(kept), "", *all_models(kept)]
    (HERE / "models.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
