"""Moves per second of one core against the size of the problem.

    speed.py [PROBLEM.json ...]      -> speed.md beside this file

The generated and published problems, and any problem files given (captured models). Each at 70 % of
the keep-all peak with the default moves and objective, with the paper's three moves and equation 1,
and with a log-add-exp in place of the maximum. CPU seconds; best of three, since other work on the
machine can only slow it down.
"""

import sys
import time
from pathlib import Path

from rekindle import _native
from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.core.generate import chain, random_layered, transformer

HERE = Path(__file__).parent
INSTANCES = HERE.parent.parent / "tests" / "instances"
MOVES = 400_000


def rate(problem: Problem, **options: object) -> float:
    peak = simulate(problem, keep_all(problem)).peak
    start = list(keep_all(problem).ops)
    best = 0.0
    for seed in range(3):
        begun = time.process_time()
        results, _ = _native.anneal(
            problem.native, [start], peak * 7 // 10, seeds=[seed], max_moves=MOVES,
            time_limit_s=60.0, **options,
        )  # fmt: skip
        best = max(best, results[0].moves / (time.process_time() - begun))
    return best / 1e6


def main() -> None:
    problems = [(name, read_problem(INSTANCES / f"{name}.json")) for name in ("RL1", "RL2", "RL3")]
    problems += [(name, read_problem(INSTANCES / f"{name}.json")) for name in ("RL4", "CM1", "CM2")]
    problems += [(f"transformer({n})", transformer(n)) for n in (4, 12, 48)]
    problems += [(f"random_layered({n})", random_layered(n)) for n in (2000, 10_000)]
    problems += [(f"chain({n})", chain(n)) for n in (1000, 12_500)]
    problems += [(Path(path).stem, read_problem(path)) for path in sys.argv[1:]]
    lines = [
        "# Millions of moves per second, one core",
        "",
        f"Made by `speed.py`: {MOVES} moves each, the fastest of three.",
        "",
        "| problem | ops | values | ours | paper's moves, max | paper's moves, log-add-exp |",
        "|---|---|---|---|---|---|",
    ]
    product = _native.Objective.product
    for name, problem in problems:
        largest = max(value.size for value in problem.values)
        rates = (
            rate(problem, objective=_native.Objective.area),
            rate(problem, objective=product, paper_moves=True, hot=1e-3, cold=1e-7),
            rate(
                problem, objective=product, paper_moves=True, hot=1e-3, cold=1e-7,
                smooth=largest / 10,
            ),
        )  # fmt: skip
        shown = " | ".join(f"{r:.2f}" for r in rates)
        lines.append(f"| {name} | {len(problem.ops)} | {len(problem.values)} | {shown} |")
        print(lines[-1], flush=True)
    (HERE / "speed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
