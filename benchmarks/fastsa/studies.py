"""What the parts are worth: figures 7, 8 and 9 of FastSA's paper, and cost against moves.

    studies.py [PROBLEM.json ...]     -> studies.md beside this file

On a generated transformer and any problem files given (captured models with unit costs).
- Grouping against none, and the maximum against log-add-exp: the paper's moves and equation 1, the
  same number of moves for all; beside them our moves and objective without grouping.
- Seeds and budgets 15 to 100 % (D.6).
- Cost against the number of moves.
Budgets are fractions of the keep-all peak. "-": the budget was not met; then the peak reached.
"""

import sys
from pathlib import Path

from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.core.generate import transformer
from rekindle.solve import Solver, run_solver
from rekindle.solve.fastsa import FastSA

HERE = Path(__file__).parent
INSTANCES = HERE.parent.parent / "tests" / "instances"
MOVES = 1_100_000


def cell(problem: Problem, solver: Solver, percent: int, seed: int = 0) -> str:
    whole = simulate(problem, keep_all(problem))
    budget = whole.peak * percent // 100
    solution = run_solver(solver, problem, budget, seed=seed, time_limit_s=300)
    if solution.schedule is not None:
        return f"{100 * (simulate(problem, solution.schedule).cost / whole.cost - 1):.2f}"
    assert solution.smallest is not None
    return f"- ({100 * simulate(problem, solution.smallest).peak / whole.peak:.0f} %)"


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


def table(title: str, head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    print(*lines, sep="\n", flush=True)
    return [*lines, ""]


def parts(problems: dict[str, Problem]) -> list[str]:
    rows = [
        [name, str(percent), *(cell(problem, solver, percent) for solver in VARIANTS.values())]
        for name, problem in problems.items()
        for percent in (70, 50, 30)
    ]
    title = f"Cost increase in % after {MOVES} moves"
    return table(title, ["problem", "budget %", *VARIANTS], rows)


def budgets(problems: dict[str, Problem]) -> list[str]:
    solver = FastSA(num_moves=400_000)
    percents = (100, 90, 80, 70, 60, 50, 40, 35, 30, 25, 20, 15)
    rows = [
        [name, str(seed), *(cell(problem, solver, percent, seed) for percent in percents)]
        for name, problem in problems.items()
        for seed in range(3)
    ]
    title = "Seeds and budgets: cost increase in %, 400000 moves"
    return table(title, ["problem", "seed", *map(str, percents)], rows)


def progress(problems: dict[str, Problem]) -> list[str]:
    counts = (50_000, 100_000, 200_000, 400_000, 800_000, 1_600_000, 3_200_000)
    rows = [
        [name, *(cell(problem, FastSA(num_moves=count), 70) for count in counts)]
        for name, problem in problems.items()
    ]
    title = "Cost increase in % at 70 % against the number of moves"
    return table(title, ["problem", *(f"{c // 1000}k" for c in counts)], rows)


def main() -> None:
    models = {"transformer(8)": transformer(8)}
    models.update((Path(path).stem, read_problem(path)) for path in sys.argv[1:])
    instances = {n: read_problem(INSTANCES / f"{n}.json") for n in ("RL2", "RL3", "RL4", "CM2")}
    lines = ["# What the parts are worth", "", "Made by `studies.py`; one thread.", ""]
    lines += parts(models | {"RL2": instances["RL2"], "CM2": instances["CM2"]})
    lines += budgets(models)
    lines += progress(instances | models)
    (HERE / "studies.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
