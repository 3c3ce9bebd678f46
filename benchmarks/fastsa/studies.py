"""What the parts are worth: figures 7, 8 and 9 of FastSA's paper, and cost against moves and time.

    studies.py parts PROBLEM.json ...      grouping and log-add-exp (figures 7 and 8)
    studies.py budgets PROBLEM.json ...    seeds and budgets, 15 to 100 % (D.6, figure 9)
    studies.py progress PROBLEM.json ...   cost against moves and CPU seconds

Each writes its section of `studies.md` beside this file, with the command that made it. The
problem files are captured models with unit costs (`capture_models.py`); `parts` and `progress` add
published instances.
"""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.core.generate import transformer
from rekindle.solve import Solver, run_solver
from rekindle.solve.anneal.fastsa import FastSA

HERE = Path(__file__).parent
RESULT = HERE / "studies.md"
INSTANCES = HERE.parent.parent / "tests" / "instances"
MOVES = 1_100_000
HEAD = "# What the parts are worth\n\nMade by `studies.py`; one thread.\n"


def solve(
    problem: Problem, solver: Solver, percent: float, seed: int = 0, *, with_resident: bool = False
) -> tuple[bool, float, float]:
    """Whether the budget was met, the cost added in %, and the peak in % of keep-all's."""
    whole = simulate(problem, keep_all(problem))
    resident = sum(problem.values[v].size for v in problem.resident) if with_resident else 0
    budget = max(1, int((resident + whole.peak) * percent / 100) - resident)
    solution = run_solver(solver, problem, budget, seed=seed, time_limit_s=300)
    found = solution.schedule or solution.smallest
    assert found is not None
    trace = simulate(problem, found)
    peak = 100 * (resident + trace.peak) / (resident + whole.peak)
    return solution.schedule is not None, 100 * (trace.cost / whole.cost - 1), peak


def cell(problem: Problem, solver: Solver, percent: float) -> str:
    met, cost, peak = solve(problem, solver, percent)
    return f"{cost:.2f}" if met else f"{cost:.1f} at {peak:.1f} %"


def published(*, grouping: bool, smooth: bool) -> FastSA:
    return FastSA(
        objective="product",
        moves="paper",
        grouping=grouping,
        smooth=smooth,
        num_moves=MOVES,
        num_seeds=1,
        temperatures=(1e-3, 1e-7),
    )


VARIANTS = {
    "paper, no groups": published(grouping=False, smooth=False),
    "paper, groups": published(grouping=True, smooth=False),
    "paper, groups, log-add-exp": published(grouping=True, smooth=True),
    "ours": FastSA(num_moves=MOVES),
    "ours, groups": FastSA(num_moves=MOVES, grouping=True),
}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def parts(problems: dict[str, Problem]) -> tuple[str, str]:
    problems = problems | {n: read_problem(INSTANCES / f"{n}.json") for n in ("RL2", "CM2")}
    rows = []
    for name, problem in problems.items():
        # Figure 7 is LLaMA at a tenth of its memory.
        for percent in (10,) if name.startswith("llama") else (70, 50, 30):
            cells = [cell(problem, solver, percent) for solver in VARIANTS.values()]
            rows.append([name, str(percent), *cells])
            print(rows[-1], flush=True)
    text = (
        f"Cost increase in % after {MOVES} moves; budget in % of the keep-all peak. Where it is not"
        " met: the cost\nat the smallest peak found. The paper's variants minimise its equation 1"
        " with its three moves and\ntemperatures; it made 22 million moves.\n\n"
        + table(["problem", "budget %", *VARIANTS], rows)
    )
    return "Grouping against none, maximum against log-add-exp (figures 7 and 8)", text


def budgets(problems: dict[str, Problem]) -> tuple[str, str]:
    solver, seeds = FastSA(num_moves=400_000), range(3)
    rows = []
    for percent in range(100, 10, -5):
        row = [str(percent)]
        for problem in problems.values():
            found = [solve(problem, solver, percent, s, with_resident=True) for s in seeds]
            costs = [cost for met, cost, _ in found if met]
            if len(costs) == len(found):
                row.append(f"{min(costs):.2f} to {max(costs):.2f}")
            else:
                row.append(f"met by {len(costs)}; {min(peak for _, _, peak in found):.1f} %")
        rows.append(row)
        print(row, flush=True)
    text = (
        "Cost increase in %, the least and the most of three seeds, 400000 moves each; budgets in %"
        " of resident +\npeak, as in the paper. Where not every seed met the budget: how many did,"
        " and the smallest memory.\n\n" + table(["budget %", *problems], rows)
    )
    return "Seeds and budgets (D.6, figure 9)", text


def progress(problems: dict[str, Problem]) -> tuple[str, str]:
    names = ("RL2", "RL3", "RL4", "CM2")
    problems = {n: read_problem(INSTANCES / f"{n}.json") for n in names} | problems
    counts = (50_000, 200_000, 800_000, 3_200_000, 6_400_000)
    rows = []
    for name, problem in problems.items():
        row = [name, str(len(problem.ops))]
        for count in counts:
            begun = time.process_time()
            shown = cell(problem, FastSA(num_moves=count), 70)
            row.append(f"{shown} ({time.process_time() - begun:.2f} s)")
        rows.append(row)
        print(row, flush=True)
    text = "Cost increase in % at 70 % of the keep-all peak, and CPU seconds of one core.\n\n"
    head = ["problem", "ops", *(f"{c // 1000}k moves" for c in counts)]
    return "Cost against moves and time", text + table(head, rows)


SECTIONS: dict[str, Callable[[dict[str, Problem]], tuple[str, str]]] = {
    "parts": parts,
    "budgets": budgets,
    "progress": progress,
}


def main() -> None:
    section, *paths = sys.argv[1:]
    models = {Path(path).stem: read_problem(path) for path in paths}
    if section == "parts":
        models = {"transformer(8)": transformer(8)} | models
    title, text = SECTIONS[section](models)
    command = " ".join(["studies.py", section, *(Path(path).name for path in paths)])
    written = f"## {title}\n\n`{command}`\n\n{text}\n"
    old = RESULT.read_text() if RESULT.exists() else HEAD
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(old):
        new = pattern.sub(lambda _: written + "\n", old)
    else:
        new = old.rstrip() + "\n\n" + written
    RESULT.write_text(new.rstrip() + "\n")


if __name__ == "__main__":
    main()
