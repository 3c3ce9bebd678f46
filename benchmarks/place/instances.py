"""Static placement within a capacity: MiniMalloc's instances, and rectangles without a gap.

    python benchmarks/place/instances.py                       # our own instances
    python benchmarks/place/instances.py --minimalloc FOLDER   # and CSV files of that format

FOLDER is `benchmarks/asplos2024` of github.com/google/minimalloc (`challenging` in older
checkouts): 11 files named after their capacity, 1,048,576, with lines "buffer,start,end,size". Our
own are rectangles of time and addresses, cut at random into blocks: a placement within the capacity
exists, and none is shorter. Times are those of this process alone; each instance has `--time-limit`
seconds of the clock. Results go to instances.json.
"""

import argparse
import csv
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.core.generate import cut_rectangle
from rekindle.core.placement import Block, overlapping, place

HERE = Path(__file__).resolve().parent


def from_file(path: Path) -> tuple[list[Block], int]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    blocks = [
        Block(int(r["size"]), int(r.get("start") or r["lower"]), int(r.get("end") or r["upper"]))
        for r in rows
    ]
    return blocks, int(path.stem.split(".")[1])


def own() -> Iterator[tuple[str, list[Block], int]]:
    for num, length in ((60, 200), (100, 400), (150, 1000), (300, 2000)):
        for seed in range(3):
            blocks = cut_rectangle(random.Random(seed), num, 1024, length)
            yield f"rectangle-{num}-{seed}", blocks, 1024


def record(name: str, blocks: list[Block], capacity: int, limit_s: float) -> dict[str, Any]:
    begun, process = time.perf_counter(), time.process_time()
    found = place(blocks, capacity=capacity, time_limit_s=limit_s)
    assert overlapping(blocks, found.offsets) is None
    result = {
        "name": name,
        "blocks": len(blocks),
        "live": found.lower_bound,
        "capacity": capacity,
        "found": found.size_bytes,
        "above_capacity": round(max(0.0, found.size_bytes / capacity - 1), 4),
        "process_s": round(time.process_time() - process, 2),
        "wall_s": round(time.perf_counter() - begun, 2),
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minimalloc", type=Path, help="a folder of CSV files")
    parser.add_argument("--time-limit", type=float, default=10.0)
    args = parser.parse_args()
    files = [] if args.minimalloc is None else sorted(args.minimalloc.glob("*.csv"))
    records = [record(path.stem, *from_file(path), args.time_limit) for path in files]
    records += [record(*instance, args.time_limit) for instance in own()]
    (HERE / "instances.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
