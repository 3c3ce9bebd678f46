"""HiRemate's Figs. 6 and 10: quality over the depth of the hierarchy and over alpha.

    python benchmarks/hiremate/depth.py [PROBLEM.json] [--share 0.6] [--time-limit 60]

H-ILP alone, without the methods that ignore the hierarchy at the top. Writes `depth.json` beside
this file. Without a problem it takes the UNet that `capture.py` wrote.
"""

import argparse
import json
from pathlib import Path

from rekindle.core import keep_all, read_problem, simulate
from rekindle.partition.base import layer_graph, read_layers
from rekindle.partition.hierarchy import HPartition
from rekindle.solve import run_solver
from rekindle.solve.hiremate import HiRemate

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    default = HERE.parents[1] / "build" / "hiremate" / "UNet.paper.json"
    parser.add_argument("problem", nargs="?", type=Path, default=default)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--time-limit", type=float, default=60.0)
    options = parser.parse_args()
    problem = read_problem(options.problem)
    plain = simulate(problem, keep_all(problem))
    graph = layer_graph(problem, read_layers(problem))
    sizes = [HPartition(max_top=12, max_group=m) for m in (8, 6, 4, 3, 2)]
    slants = [HPartition(alpha=alpha) for alpha in (0.0, 1.0, 2.0)]
    rows = []
    for partitioner in (*sizes, *slants):
        solver = HiRemate(partitioner=partitioner, whole=(), max_flat=0)
        solution = run_solver(
            solver, problem, int(plain.peak * options.share), time_limit_s=options.time_limit
        )
        found = solution.schedule
        rows.append(
            {
                "problem": problem.name,
                "share": options.share,
                "max_group": partitioner.max_group,
                "alpha": partitioner.alpha,
                "levels": partitioner.partition(graph).depth,
                "overhead": None
                if found is None
                else round(100 * (simulate(problem, found).cost / plain.cost - 1), 2),
                "wall_s": round(solution.wall_s, 1),
            }
        )
        print(rows[-1], flush=True)
        (HERE / "depth.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
