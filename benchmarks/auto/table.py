"""Every solver on every instance at every budget: cost increase, bound and time.

    python benchmarks/auto/table.py                     # run what is missing, then print the table
    python benchmarks/auto/table.py --solvers auto,fastsa --limit 10 --instances RL1,chain-1000
    python benchmarks/auto/table.py --table             # print what is stored

Instances: the public ones of tests/instances (RL1-4, CM1-2), generated families of 100 to 10,000
ops, and the problems captured from real models that lie in benchmarks/problems (measured on a GPU).
Each case is a process of its own with the same limit: two cores for `auto`, one for every other
solver; side_by_side.py runs them, and says how they are resumed, killed and kept to `--deadline`.
Results are appended to table.jsonl beside this file. The table shows, per case, the record with the
most time; page.py puts all of it into the docs, TABLE.md has `auto` on the public instances.
"""

import argparse
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from side_by_side import Record, cell, longest, read_records, run_all

from rekindle.core import Problem, read_problem
from rekindle.core.files import problem_from_record
from rekindle.core.generate import chain, random_layered, transformer, unet
from rekindle.solve import SOLVERS

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


def table(records: list[Record], instances: list[str]) -> str:
    by = longest([r for r in records if r["problem"] in instances])
    solvers = [s.name for s in SOLVERS if any(key[2] == s.name for key in by)]
    limits = sorted({r["limit_s"] for r in by.values()})
    lines = [
        "Cost increase over saving everything, in %, and the seconds taken. Time limit per case: "
        + ", ".join(f"{limit:g}" for limit in limits)
        + " s.",
        "",
        "| in a cell | meaning |",
        "|---|---|",
        "| bound | proven: no schedule within the budget costs less |",
        "| * | proven optimal among the schedules that the solver considers |",
        "| none | no schedule within the budget found |",
        "| refuses | the solver does not handle this graph |",
        "| overran | exceeded its time limit and was killed |",
        "",
        "| instance | ops | budget | bound | " + " | ".join(solvers) + " |",
        "|---|---|---|---|" + "---|" * len(solvers),
    ]
    place = {name: k for k, name in enumerate(instances)}
    for instance, minus in sorted({(k[0], -k[1]) for k in by}, key=lambda r: (place[r[0]], r[1])):
        mine = [by.get((instance, -minus, s)) for s in solvers]
        present: list[dict[str, Any]] = [r for r in mine if r is not None]
        num_ops = next((r["num_ops"] for r in present if "num_ops" in r), "")
        bounds = [r["bound"] for r in present if r["solver"] == "auto" and "bound" in r]
        bound = f"{bounds[0]:.2f}" if bounds else ""
        cells = " | ".join(cell(r) for r in mine)
        lines.append(f"| {instance} | {num_ops} | {-minus:.0%} | {bound} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--solvers", default=",".join(s.name for s in SOLVERS))
    parser.add_argument("--instances", default=",".join(names()))
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--limit", type=float, default=30.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="cores to use")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds for all of this call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "table.jsonl")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.problems, args.rows, args.out, args.least = args.instances, "", args.results, None
    args.seconds = args.auto_seconds = args.limit
    if not args.table:
        run_all(args)
    records = read_records(args.results)
    print(table(records, names()))
    alone = [r for r in records if r["solver"] == "auto"]
    public = [name for name in names() if (PUBLIC / f"{name}.json").exists()]
    (args.results.parent / "TABLE.md").write_text(table(alone, public) + "\n")


if __name__ == "__main__":
    main()
