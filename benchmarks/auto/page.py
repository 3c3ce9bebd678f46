"""The docs page that shows `auto` beside the other solvers, from the stored results.

    python benchmarks/auto/page.py        # writes docs/side-by-side.md and the plots beside it

It runs nothing: side_by_side.py and table.py make the results (each goes on where it stopped).
A plot shows, for every solver, how far above the best schedule known it is after so many seconds:
the mean over the rows (problem, budget) on which it found a schedule in the end.
"""

import itertools
import math
from pathlib import Path
from typing import Any

from side_by_side import SOLVERS, longest, markdown, read_records
from table import CAPTURED, FAMILIES, names, table

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"
COLORS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#ff7f0e", "#17becf")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 400, 60, 44, 16
FIRST_S, LAST_S = 0.3, 600.0
LOW, HIGH = 0.01, 100.0  # percent points above the best known; less is drawn at the bottom
Record = dict[str, Any]


def steps(record: Record) -> list[tuple[float, float]]:
    """(seconds, increase) of each improvement, the simulated result last."""
    found = [(seconds, increase) for seconds, increase in record["trail"]]
    return [*found, (record["wall_s"], record["increase"])]


def at(points: list[tuple[float, float]], seconds: float) -> float | None:
    reached = [increase for when, increase in points if when <= seconds]
    return min(reached, default=None)


def curve(records: list[Record], best: dict[tuple[str, float], float]) -> list[tuple[float, float]]:
    """(seconds, mean distance from the best known), from where every row has a schedule."""
    trails = [(best[r["problem"], r["budget"]], steps(r)) for r in records if "increase" in r]
    times = [FIRST_S * (LAST_S / FIRST_S) ** (k / 120) for k in range(121)]
    result = []
    for seconds in times if trails else []:
        heights = [at(points, seconds) for _, points in trails]
        if all(height is not None for height in heights):
            above = [
                max(0.0, height - least)
                for height, (least, _) in zip(heights, trails, strict=True)
                if height is not None
            ]
            result.append((seconds, sum(above) / len(above)))
    return result


def place(seconds: float, above: float) -> tuple[float, float]:
    x = math.log(seconds / FIRST_S) / math.log(LAST_S / FIRST_S)
    y = math.log(min(HIGH, max(LOW, above)) / LOW) / math.log(HIGH / LOW)
    width, height = WIDTH - LEFT - 120, HEIGHT - BOTTOM - TOP
    return LEFT + x * width, HEIGHT - BOTTOM - y * height


def plot(records: list[Record]) -> str:
    known = [r for r in longest(records).values() if "increase" in r]
    best: dict[tuple[str, float], float] = {}
    for r in known:
        key = (r["problem"], r["budget"])
        best[key] = min(best.get(key, math.inf), r["increase"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for seconds in (1, 10, 30, 100, 600):
        x, y = place(seconds, LOW)
        parts.append(f'<text x="{x:.0f}" y="{y + 16:.0f}" text-anchor="middle">{seconds} s</text>')
    for above in (0.01, 0.1, 1, 10, 100):
        x, y = place(FIRST_S, above)
        end, _ = place(LAST_S, above)
        parts.append(f'<path d="M{x:.0f} {y:.1f}H{end:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{above:g}</text>')
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 8}">seconds; points above the best known, mean of the rows '
        "that the solver meets</text>"
    )
    solvers = sorted({r["solver"] for r in known}, key=lambda s: (s not in SOLVERS, s))
    for name, color in zip(solvers, itertools.cycle(COLORS), strict=False):
        mine = [r for r in known if r["solver"] == name]
        points = [place(*point) for point in curve(mine, best)]
        if points:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            x, y = points[-1]
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts.append(
                f'<text x="{x + 6:.0f}" y="{y + 4:.0f}" fill="{color}">{name} ({len(mine)})</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def provenance(records: list[Record]) -> list[str]:
    """Where the numbers are from, and which runs did not have their core for themselves."""
    rows: dict[str, set[str]] = {}
    for r in longest(records).values():
        if r.get("shared_core"):
            rows.setdefault(r["solver"], set()).add(f"{r['problem']} {r['budget']:.0%}")
    return [
        "## Provenance",
        "",
        "| what | from |",
        "|---|---|",
        "| this page | `python benchmarks/auto/page.py`, from stored results |",
        "| first table | `python benchmarks/auto/side_by_side.py` |",
        "| other tables | `python benchmarks/auto/table.py` |",
        "| empty cells | not run yet; both commands continue where they stopped |",
        *(
            f"| `{solver}` with about half a core, as the core was shared | "
            f"{', '.join(sorted(where))} |"
            for solver, where in sorted(rows.items())
        ),
    ]


def main() -> None:
    long = read_records(HERE / "side_by_side.jsonl")
    short = read_records(HERE / "table.jsonl")
    captured = [n for n in names() if (CAPTURED / f"{n}.json.gz").exists()]
    groups = {
        "public": [n for n in names() if n not in captured and n not in FAMILIES],
        "generated": list(FAMILIES),
        "captured": captured,
    }
    lines = [
        "# `auto` and the other solvers, side by side",
        "",
        "How expensive the schedules of each solver are, and how long it takes to find them.",
        "",
    ]
    if long:
        (DOCS / "side-by-side.svg").write_text(plot(long))
        lines += [
            "## Graphs captured from real models, ten minutes for the others",
            "",
            "`auto` has two cores and 30 s, every other solver one core and up to ten minutes.",
            "",
            "![points above the best schedule known, by seconds](side-by-side.svg)",
            "",
            markdown(long),
            "",
        ]
    titles = {
        "public": "Public instances",
        "generated": "Generated families, 100 to 10,000 ops",
        "captured": "Graphs captured from real models, the same limit for all",
    }
    for group, title in titles.items():
        mine = [r for r in short if r["problem"] in groups[group]]
        if not mine:
            continue
        lines += [f"## {title}", ""]
        if any(r["trail"] for r in mine):
            (DOCS / f"side-by-side-{group}.svg").write_text(plot(mine))
            lines += [f"![points above the best schedule known](side-by-side-{group}.svg)", ""]
        lines += [table(mine, groups[group]), ""]
    lines += provenance(long)
    (DOCS / "side-by-side.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
