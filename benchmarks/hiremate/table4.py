"""HiRemate's Table 4: planning time and overhead on twelve models, beside the paper's columns.

    python benchmarks/hiremate/table4.py [--problems DIR] [--time-limit 60] [NAME ...]

DIR is what `capture.py` wrote. Writes `table4.json` and `table4.md` beside this file.
Planning time is without capture and profile; the paper's includes both.

The gradients of parameters have size 0 here, as in the paper: its values are those of the nodes of
the forward graph, their gradients and what autograd saves beside them (Rockmate, A.6; HiRemate,
B.1), and a parameter is no node. They stay from the backward to the optimizer's step whatever the
schedule, and its budgets are for activations. `rekindle.plan` does count them.
"""

import argparse
import json
import time
from pathlib import Path

from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.partition.hierarchy import HPartition
from rekindle.partition.layer_graph import layer_graph, read_layers
from rekindle.partition.parts import cut_part
from rekindle.partition.separators import find_rows
from rekindle.solve import run_solver
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.hierarchy.rockmate import Blocks, Rockmate

HERE = Path(__file__).parent
# name: paper's planning minutes, memory % of plain, time % of plain (predicted), levels,
# subgraphs, distinct ones, largest
PAPER = {
    "GPT-24": (7.9, 36.6, 122.3, 3, 28, 8, 15),
    "GPT-96": (15, 47.2, 119.6, 4, 61, 21, 10),
    "UNet": (9, 51.3, 113.5, 2, 9, 9, 15),
    "Mixer": (1.5, 53.3, 107.3, 2, 15, 6, 10),
    "RegNet": (5, 41.1, 107.0, 2, 15, 10, 15),
    "ResNet-101": (5.5, 42.6, 115.3, 2, 19, 10, 15),
    "Transformer 6-6": (20, 46.9, 117.6, 3, 23, 20, 17),
    "Transformer 36-36": (147, 44.6, 118.4, 16, 128, 67, 19),
    "FNO 1d": (2.5, 53.1, 114.7, 2, 10, 5, 8),
    "FNO 3d": (5.3, 47.2, 117.4, 2, 12, 12, 10),
    "U-FNO": (16.3, 56.7, 116.3, 2, 11, 9, 17),
    "UNO": (46, 58.5, 121.9, 4, 12, 12, 19),
}


def structure(problem: Problem) -> dict[str, int]:
    layers = read_layers(problem)
    start = time.process_time()
    tree = HPartition().partition(layer_graph(problem, layers))
    groups = list(tree.walk())
    rows = find_rows(problem)
    blocks = None if isinstance(rows, str) else Blocks(problem, rows)
    return {
        "blocks": 0 if blocks is None else len(blocks.parts),
        "kinds": 0 if blocks is None else blocks.num_distinct,
        "ops": len(problem.ops),
        "forward_ops": len(layers.layers),
        "levels": tree.depth,
        "groups": len(groups),
        "distinct": len({cut_part(problem, layers, g.layers).form for g in groups}),
        "largest": max(len(g.children) for g in groups),
        "partition_ms": round(1000 * (time.process_time() - start)),
    }


def measure(
    problem: Problem, share: float, time_limit_s: float, rockmate: bool
) -> dict[str, object]:
    plain = simulate(problem, keep_all(problem))
    budget = int(plain.peak * share)
    row: dict[str, object] = {}
    for solver in (HiRemate(), *((Rockmate(),) if rockmate else ())):
        if solver.accepts(problem) is not None:
            row[solver.name] = None
            continue
        cpu = time.process_time()
        solution = run_solver(solver, problem, budget, time_limit_s=time_limit_s)
        found: dict[str, object] = {
            "wall_s": round(solution.wall_s, 1),
            "cpu_s": round(time.process_time() - cpu, 1),
            "notes": solution.notes,
        }
        if solution.schedule is not None:
            trace = simulate(problem, solution.schedule)
            found["memory"] = round(100 * trace.peak / plain.peak, 1)
            found["time"] = round(100 * trace.cost / plain.cost, 2)
        row[solver.name] = found
    return row


def table(rows: dict[str, dict]) -> str:
    lines = [
        "HiRemate's Table 4 beside ours: memory and time in % of plain, at the paper's memory. "
        "Costs are the roofline estimates of `p100.toml`. Parameter gradients are not counted, as "
        "in the paper (see `table4.py`). CPU seconds are of both cores, wall seconds of a "
        "machine that was busy with other work.",
        "",
        "| model | ops (forward) | chain blocks, kinds | levels, groups, distinct, largest (paper) "
        "| memory % | time %, "
        "paper | time %, hiremate | time %, rockmate | planning, paper | planning, CPU s (wall) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        minutes, memory, predicted, *shape = PAPER[name]
        hi, rock = row["hiremate"], row.get("rockmate")
        lines.append(
            f"| {name} | {row['ops']} ({row['forward_ops']}) | "
            f"{row.get('blocks', '-')}, {row.get('kinds', '-')} | "
            f"{row['levels']}, {row['groups']}, "
            f"{row['distinct']}, {row['largest']} ({', '.join(map(str, shape))}) | {memory} | "
            f"{predicted} | {hi.get('time', 'none')} | "
            f"{rock.get('time', 'none') if rock else '-'} | {minutes} min | "
            f"{hi['cpu_s']} ({hi['wall_s']}) |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=Path, default=HERE.parents[1] / "build" / "hiremate")
    parser.add_argument("names", nargs="*", default=list(PAPER))
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--rockmate", action="store_true")
    parser.add_argument("--structure-only", action="store_true")
    options = parser.parse_intermixed_args()
    out = HERE / "table4.json"
    rows = json.loads(out.read_text()) if out.exists() else {}
    for name in options.names:
        path = options.problems / f"{name.replace(' ', '_')}.paper.json"
        problem = read_problem(path)
        rows[name] = rows.get(name, {}) | structure(problem)
        if not options.structure_only:
            rows[name] |= measure(
                problem, PAPER[name][1] / 100, options.time_limit, options.rockmate
            )
        print(name, rows[name], flush=True)
        rows = {key: rows[key] for key in PAPER if key in rows}
        out.write_text(json.dumps(rows, indent=1) + "\n")
        (HERE / "table4.md").write_text(table(rows))


if __name__ == "__main__":
    main()
