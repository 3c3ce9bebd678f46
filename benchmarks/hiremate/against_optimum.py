"""hiremate beside the optimum of `checkmate` on generated training graphs, small enough for a proof
of most. The models of HiRemate's Table 3 are in `table3.py`.

    python benchmarks/hiremate/against_optimum.py [--time-limit 60]

Writes `against_optimum.json` beside this file: overheads in %, and checkmate's proven bound.
"""

import argparse
import json
from pathlib import Path

from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.core.generate import chain, transformer, unet
from rekindle.solve import run_solver
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.staged.checkmate import Checkmate

HERE = Path(__file__).parent
SHARES = (0.9, 0.8, 0.7, 0.6)


def generated() -> list[Problem]:
    return [
        chain(8),
        chain(12, seed=1),
        transformer(1, batch=16),
        transformer(2, batch=16),
        unet(1, pixels=128 * 128),
        unet(2, blocks=1, pixels=256 * 256),
    ]


def compare(problem: Problem, share: float, time_limit_s: float) -> dict[str, object]:
    plain = simulate(problem, keep_all(problem))
    budget = int(plain.peak * share)

    def overhead(schedule: Schedule | None) -> float | None:
        if schedule is None:
            return None
        return round(100 * (simulate(problem, schedule).cost / plain.cost - 1), 3)

    ours = run_solver(HiRemate(), problem, budget, time_limit_s=time_limit_s)
    best = run_solver(
        Checkmate(), problem, budget, time_limit_s=time_limit_s, warm_start=ours.schedule
    )
    bound = None if best.bound is None else round(100 * (best.bound / plain.cost - 1), 3)
    return {
        "problem": problem.name,
        "share": share,
        "hiremate": overhead(ours.schedule),
        "hiremate_s": round(ours.wall_s, 1),
        "checkmate": overhead(best.schedule),
        "bound": bound,
        "status": best.status.name,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--time-limit", type=float, default=60.0)
    options = parser.parse_args()
    rows = []
    for problem in generated():
        for share in SHARES:
            rows.append(compare(problem, share, options.time_limit))
            print(rows[-1], flush=True)
            (HERE / "against_optimum.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
