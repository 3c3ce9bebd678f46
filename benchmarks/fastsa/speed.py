"""Moves per second of one core against the size of the problem.

    speed.py [PROBLEM.json ...]      -> speed.md beside this file

A move is one iteration, as the paper counts: a proposal is drawn and accepted or not. For some
draws there is nothing to propose (no op stands twice that could be forgotten, the slot is taken);
the second figure counts only the proposals that were judged.

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


def rate(problem: Problem, **options: object) -> tuple[float, float]:
    """Millions per CPU second: moves, and proposals judged."""
    peak = simulate(problem, keep_all(problem)).peak
    start = list(keep_all(problem).ops)
    best = (0.0, 0.0)
    for seed in range(3):
        begun = time.process_time()
        results, _ = _native.anneal(
            problem.native, [start], peak * 7 // 10, seeds=[seed], max_moves=MOVES,
            time_limit_s=60.0, **options,
        )  # fmt: skip
        micros = 1e6 * (time.process_time() - begun)
        best = max(best, (results[0].moves / micros, results[0].judged / micros))
    return best


def main() -> None:
    problems = [(name, read_problem(INSTANCES / f"{name}.json")) for name in ("RL1", "RL2", "RL3")]
    problems += [(name, read_problem(INSTANCES / f"{name}.json")) for name in ("RL4", "CM1", "CM2")]
    problems += [(f"transformer({n})", transformer(n)) for n in (4, 12, 48)]
    problems += [(f"random_layered({n})", random_layered(n)) for n in (2000, 10_000)]
    problems += [(f"chain({n})", chain(n)) for n in (1000, 12_500)]
    problems += [(Path(path).stem, read_problem(path)) for path in sys.argv[1:]]
    command = " ".join(["speed.py", *(Path(path).name for path in sys.argv[1:])])
    lines = [
        "# Millions of moves per second, one core",
        "",
        f"Made by `{command}`: {MOVES} moves each, CPU seconds, the fastest of three.",
        "A move is one iteration, as the paper counts: a proposal is drawn, and accepted or not.",
        "In brackets: only the proposals that there was something to judge about.",
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
        shown = " | ".join(f"{moves:.2f} ({judged:.2f})" for moves, judged in rates)
        lines.append(f"| {name} | {len(problem.ops)} | {len(problem.values)} | {shown} |")
        print(lines[-1], flush=True)
    (HERE / "speed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
