"""Every solver on every instance at every budget: cost increase, peak, bound and time.

    python benchmarks/auto/table.py                     # run what is missing, then print the table
    python benchmarks/auto/table.py --solvers auto --limit 10 --instances RL1,CM2
    python benchmarks/auto/table.py --table             # print what is stored

Instances: the public ones of tests/instances (RL1-4, CM1-2), generated families at several sizes,
and the problems captured from real models that lie in benchmarks/problems (measured on a GPU).
Results are kept in results.json beside this file, one record per (instance, budget, solver, limit);
only missing ones are run.
"""

import argparse
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.core.files import problem_from_record, write_json
from rekindle.core.generate import chain, random_layered, transformer, unet
from rekindle.errors import RekindleError
from rekindle.solve import SOLVERS, find_solver, run_solver
from rekindle.solve.base import unavailable, without_dead_ops

HERE = Path(__file__).resolve().parent
PUBLIC = HERE.parent.parent / "tests" / "instances"
CAPTURED = HERE.parent / "problems"
BUDGETS = (0.9, 0.8, 0.7, 0.5, 0.3, 0.2)
FAMILIES: dict[str, Callable[[], Problem]] = {
    "chain-100": lambda: chain(50),
    "chain-1000": lambda: chain(500),
    "chain-10000": lambda: chain(5000),
    "transformer-300": lambda: transformer(12),
    "transformer-1000": lambda: transformer(48),
    "transformer-10000": lambda: transformer(450),
    "unet-170": lambda: unet(5),
    "layered-250": lambda: random_layered(250),
    "layered-2000": lambda: random_layered(2000),
}


def names() -> list[str]:
    public = sorted(path.stem for path in PUBLIC.glob("*.json"))
    captured = sorted(path.name.removesuffix(".json.gz") for path in CAPTURED.glob("*.json.gz"))
    return [*public, *FAMILIES, *captured]


def load(name: str) -> Problem:
    if name in FAMILIES:
        return FAMILIES[name]()
    if (PUBLIC / f"{name}.json").exists():
        return read_problem(PUBLIC / f"{name}.json")
    with gzip.open(CAPTURED / f"{name}.json.gz", "rt") as file:
        return problem_from_record(json.load(file), name)


def run(name: str, problem: Problem, share: float, solver: str, limit_s: float) -> dict[str, Any]:
    base = simulate(problem, keep_all(problem))
    record: dict[str, Any] = {
        "instance": name, "budget": share, "solver": solver, "limit_s": limit_s,
        "num_ops": len(problem.ops),
    }  # fmt: skip
    try:
        solution = run_solver(
            find_solver(solver), problem, int(share * base.peak), time_limit_s=limit_s
        )
    except RekindleError as error:
        return record | {"refused": str(error)[:200]}
    record |= {"status": solution.status.name, "wall_s": round(solution.wall_s, 2)}
    found = solution.schedule or solution.smallest
    if found is not None:
        trace = simulate(problem, found)
        record["peak"] = round(trace.peak / base.peak, 4)
        if solution.schedule is not None:
            record["increase"] = round(100 * (trace.cost / base.cost - 1), 3)
    if solution.bound is not None:
        record["bound"] = round(100 * (solution.bound / base.cost - 1), 3)
    return record


def cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    if "increase" in record:
        return f"{record['increase']:.2f} ({record['wall_s']:.0f} s)"
    return "refused" if "refused" in record else f"none ({record.get('wall_s', 0):.0f} s)"


def table(records: list[dict[str, Any]]) -> str:
    solvers = [s.name for s in SOLVERS if any(r["solver"] == s.name for r in records)]
    by = {(r["instance"], r["budget"], r["solver"]): r for r in records}
    rows = sorted(
        {(r["num_ops"], r["instance"], -r["budget"]) for r in records},
        key=lambda row: (row[1], row[2]),
    )
    lines = [
        "Cost increase in % (seconds). Bound: no schedule within the budget costs less.",
        "",
        "| instance | ops | budget | bound | " + " | ".join(solvers) + " |",
        "|---|---|---|---|" + "---|" * len(solvers),
    ]
    for num_ops, instance, minus in rows:
        mine = [by.get((instance, -minus, s)) for s in solvers]
        bounds = [
            r["bound"] for r in mine if r and r["solver"] == "auto" and r.get("bound") is not None
        ]
        bound = f"{max(bounds):.2f}" if bounds else ""
        cells = " | ".join(cell(r) for r in mine)
        lines.append(f"| {instance} | {num_ops} | {-minus:.0%} | {bound} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solvers", default=",".join(s.name for s in SOLVERS))
    parser.add_argument("--instances", default=",".join(names()))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    records: list[dict[str, Any]] = []
    if args.results.exists():
        records = json.loads(args.results.read_text())["records"]
    done = {(r["instance"], r["budget"], r["solver"], r["limit_s"]) for r in records}
    for name in [] if args.table else args.instances.split(","):
        problem = load(name)
        for solver in args.solvers.split(","):
            known = find_solver(solver)
            if unavailable(known) or known.accepts(without_dead_ops(problem)[0]):
                continue
            for share in map(float, args.budgets.split(",")):
                if (name, share, solver, args.limit) in done:
                    continue
                record = run(name, problem, share, solver, args.limit)
                records.append(record)
                print(f"{name:24} {share:4.0%} {solver:16} {cell(record)}", flush=True)
                write_json(args.results, {"records": records})
    text = table(records)
    (args.results.parent / "TABLE.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
