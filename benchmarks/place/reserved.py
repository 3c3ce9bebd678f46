"""What a step reserves by the model of the caching allocator: as eager allocates, with expandable
segments, from an arena; and the shortest static placement of its blocks.

    python benchmarks/place/reserved.py          # writes reserved.json and reserved.md

Problems are those of `benchmarks/problems`, captured and measured on an H200; schedules are
keep-all and those that `auto` finds in `--time-limit` seconds. Bytes are a step's, above what is
resident.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle import _native
from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.core.files import problem_from_record
from rekindle.core.placement import Block, place
from rekindle.predict.caching_allocator import best_arena, pool_events, reserved_peak
from rekindle.solve.registry import find_solver

HERE = Path(__file__).resolve().parent
PROBLEMS = HERE.parent / "problems"
GIB, MIB = 2**30, 2**20


def blocks_of(problem: Problem, schedule: Schedule) -> list[Block]:
    """The large blocks of a step: those that no small segment serves."""
    events = pool_events(problem, schedule, callers=False)
    found: list[list[int]] = []
    for time, event in enumerate(events):
        if event > 0:
            found.append([event, time, len(events)])
        else:
            found[-event - 1][2] = time
    return [Block(size, birth, death) for size, birth, death in found if size > MIB]


def schedules(problem: Problem, time_limit_s: float) -> Iterator[tuple[float, Schedule]]:
    everything = keep_all(problem)
    yield 1.0, everything
    peak = simulate(problem, everything).peak
    for share in (0.5, 0.3):
        solution = find_solver("auto").solve(
            problem, int(share * peak), time_limit_s=time_limit_s, seed=0
        )
        if solution.schedule is not None:
            yield share, solution.schedule


def record(
    name: str, share: float, problem: Problem, schedule: Schedule, limit_s: float
) -> dict[str, Any]:
    events = pool_events(problem, schedule)
    arena = best_arena(problem, schedule)
    placed = place(blocks_of(problem, schedule), time_limit_s=limit_s)
    growing = _native.replay(_native.PoolRules(True), events, [], [], 3)
    return {
        "model": name,
        "budget": share,
        "peak_bytes": simulate(problem, schedule).peak,
        "segments_bytes": reserved_peak(problem, schedule),
        "expandable_bytes": growing.peak_reserved,
        "arena": list(arena),
        "arena_bytes": reserved_peak(problem, schedule, arena=arena),
        "placed_bytes": placed.size_bytes,
        "placed_gap": placed.gap,
    }


def table(records: list[dict[str, Any]]) -> str:
    lines = [
        "# Reserved memory by the model of the allocator",
        "",
        "Reserved bytes of a step over its peak. Made by `python benchmarks/place/reserved.py`; no",
        "GPU took part but for the measured sizes and workspaces of the problems.",
        "",
        "| model | budget | peak GiB | segments | expandable | arena | placed | gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("segments_bytes", "expandable_bytes", "arena_bytes", "placed_bytes")
    for r in records:
        shares = " | ".join(f"{r[name] / r['peak_bytes']:.3f}" for name in names)
        lines.append(
            f"| {r['model']} | {r['budget']} | {r['peak_bytes'] / GIB:.2f} | {shares} "
            f"| {100 * r['placed_gap']:.1f} % |"
        )
    lines += [
        "",
        "- segments: as eager allocates, three steps from an empty cache.",
        "- expandable: with `expandable_segments:True`.",
        "- arena: with `arena=True`, small segments included.",
        "- placed: offsets of large blocks in one range, and how far that is from a lower bound.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", default="", help="names, separated by commas; default: all")
    parser.add_argument("--time-limit", type=float, default=4.0, help="seconds for the solver")
    parser.add_argument("--place-limit", type=float, default=3.0, help="seconds for a placement")
    args = parser.parse_args()
    stored = sorted(path.name.removesuffix(".json.gz") for path in PROBLEMS.glob("*.json.gz"))
    records = []
    for name in args.problems.split(",") if args.problems else stored:
        with gzip.open(PROBLEMS / f"{name}.json.gz", "rt", encoding="utf-8") as file:
            problem = problem_from_record(json.load(file), name)
        for share, schedule in schedules(problem, args.time_limit):
            records.append(record(name, share, problem, schedule, args.place_limit))
            print(table(records).splitlines()[6 + len(records)], flush=True)
    (HERE / "reserved.json").write_text(json.dumps(records, indent=1) + "\n")
    (HERE / "reserved.md").write_text(table(records))


if __name__ == "__main__":
    main()
