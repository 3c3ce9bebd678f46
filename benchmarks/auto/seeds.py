"""How much of `auto`'s quality is luck: the spread of the cost increase over ten seeds.

    python benchmarks/auto/seeds.py --seconds 10 --jobs 2
    python benchmarks/auto/seeds.py --missing --deadline 600
    python benchmarks/auto/seeds.py --table             # print what is stored

Each run is bound to two cores of its own and has the given seconds; none starts after the deadline.
Results are kept in seeds.json beside this file as they come, one record per (instance, budget,
seed, seconds): a run takes the place of the one before it, or with `--missing` is left out where
there is one. The claim is a spread (largest less smallest) of at most 0.3 percent points in every
row. In the last one gradients alone exceed the budget: ten other seeds may be spread wider.
"""

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from table import load

from rekindle.core import keep_all, simulate
from rekindle.core.disk import write_json
from rekindle.solve import run_solver
from rekindle.solve.auto.auto import Auto

HERE = Path(__file__).resolve().parent
ROWS = (
    "RL1:0.7,RL2:0.7,RL3:0.7,RL3:0.8,RL4:0.7,RL4:0.8,CM1:0.7,CM2:0.7,unet:0.5,mixer-b16:0.3,"
    "resnet101:0.3,transformer-6-6:0.35,vit-large:0.3,gpt2-medium-fp32-eager:0.35,"
    "regnet-x-32gf:0.3,gpt2-medium-bf16-sdpa:0.3,llama-1b-4x4096:0.5,fno3d:0.6,t5-base:0.3,"
    "regnet-x-32gf:0.25"
)


Key = tuple[str, float, int, float]  # instance, budget, seed, seconds


def key_of(record: dict[str, Any]) -> Key:
    return record["instance"], record["budget"], record["seed"], record["seconds"]


def bind(pairs: "multiprocessing.Queue[set[int]]") -> None:
    """This worker keeps to a pair of cores that no other has."""
    os.sched_setaffinity(0, pairs.get())


def run(key: Key, last_start: float) -> dict[str, Any] | None:
    """None: too late to start."""
    if time.time() > last_start:
        return None
    instance, share, seed, seconds = key
    problem = load(instance)
    base = simulate(problem, keep_all(problem))
    budget = int(share * base.peak)
    solution = run_solver(Auto(threads=2), problem, budget, time_limit_s=seconds, seed=seed)
    record: dict[str, Any] = {
        "instance": instance, "budget": share, "seed": seed, "seconds": seconds,
    }  # fmt: skip
    if solution.schedule is not None:
        cost = simulate(problem, solution.schedule).cost
        record["increase"] = round(100 * (cost / base.cost - 1), 4)
    return record


def table(records: list[dict[str, Any]]) -> str:
    lines = [
        "| instance | budget | seconds | seeds | best | worst | spread, points |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = sorted({(r["instance"], -r["budget"], r["seconds"]) for r in records})
    for instance, minus, seconds in rows:
        key = (instance, -minus, seconds)
        mine = [r for r in records if (r["instance"], r["budget"], r["seconds"]) == key]
        found = [r["increase"] for r in mine if "increase" in r]
        cells = "none | none | none"
        if found:
            cells = f"{min(found):.2f} | {max(found):.2f} | {max(found) - min(found):.2f}"
        if len(found) < len(mine):
            cells += f" ({len(mine) - len(found)} found none)"
        lines.append(f"| {instance} | {-minus:.0%} | {seconds:.0f} | {len(mine)} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=ROWS, help="INSTANCE:BUDGET,...")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="cores to use")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds; then none starts")
    parser.add_argument("--missing", action="store_true", help="only what is not stored")
    parser.add_argument("--results", type=Path, default=HERE / "seeds.json")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    records: dict[Key, dict[str, Any]] = {}
    if args.results.exists():
        records = {key_of(r): r for r in json.loads(args.results.read_text())["records"]}
    keys: list[Key] = []
    for row in [] if args.table else args.rows.split(","):
        instance, _, share = row.partition(":")
        keys += [(instance, float(share), seed, args.seconds) for seed in range(args.seeds)]
    if args.missing:
        keys = [key for key in keys if key not in records]
    cores = sorted(os.sched_getaffinity(0))[: args.jobs]
    pairs: multiprocessing.Queue[set[int]] = multiprocessing.Queue()
    jobs = max(1, len(cores) // 2)
    for k in range(jobs):
        pairs.put(set(cores[2 * k : 2 * k + 2]))
    last_start = time.time() + args.deadline
    with ProcessPoolExecutor(jobs, initializer=bind, initargs=(pairs,)) as pool:
        for future in as_completed([pool.submit(run, key, last_start) for key in keys]):
            record = future.result()
            if record is not None:
                records[key_of(record)] = record
                write_json(args.results, {"records": list(records.values())})
    print(table(list(records.values())))


if __name__ == "__main__":
    main()
