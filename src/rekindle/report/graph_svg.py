"""A drawing of a problem and its schedule as SVG: the graph, its blocks, and the runs in time.

Above, the ops: the forward from left to right, below it the backward, each op under the one whose
gradient it computes. The blocks of a chain (`partition.separators`), if the forward is one, are
shaded. Below, the schedule: one bar per run, as wide as its cost, under the memory over the steps.
Hovering over an op or a run names it. Everything is in one file, without scripts.
"""

from collections.abc import Iterator
from html import escape

from rekindle.core import Problem, Schedule, simulate
from rekindle.partition.separators import find_rows

_STEP, _MARGIN, _ROW = 14, 20, 12  # pixels
_FORWARD_Y, _BACKWARD_Y = 90, 190
_MEMORY, _BAR = 90, 26  # heights
_COLOURS = {"forward": "#4c78a8", "backward": "#9467bd", "loss": "#444", "again": "#f58518"}
_STYLE = (
    "text{font:12px sans-serif}.e{fill:none;stroke:#000;stroke-opacity:.18}"
    ".again{stroke:#f58518;stroke-width:3}.b{fill:#4c78a8;fill-opacity:.08}"
    ".m{fill:#4c78a8;fill-opacity:.25;stroke:#4c78a8}"
)


def graph_svg(problem: Problem, schedule: Schedule) -> str:
    """The drawing as the text of an SVG file."""
    trace = simulate(problem, schedule)
    places = _places(problem)
    lowest = max((y for _, y in places), default=_BACKWARD_Y)
    right = max((x for x, _ in places), default=0)
    width = max(900, right + 2 * _MARGIN)
    top = lowest + 50  # of the memory
    height = top + _MEMORY + _BAR + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{_STYLE}</style>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_legend(problem, trace.peak, trace.cost, schedule),
        *_blocks(problem, places, lowest),
        *_edges(problem, places),
        *_nodes(problem, places, trace.runs),
        *_runs(problem, schedule, trace.memory, width, top),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _kind(problem: Problem, i: int) -> str:
    return problem.ops[i].phase or "forward"


def _places(problem: Problem) -> list[tuple[int, int]]:
    """Where each op stands; a backward op without a forward of its own, where the last one did."""
    places: list[tuple[int, int]] = []
    column = below = 0
    taken: dict[int, int] = {}  # column: backward ops in it
    for i, op in enumerate(problem.ops):
        if _kind(problem, i) != "backward":
            places.append((_MARGIN + _STEP * column, _FORWARD_Y))
            below = column
            column += 1
            continue
        if op.grad_of is not None:
            below = (places[op.grad_of][0] - _MARGIN) // _STEP
        taken[below] = taken.get(below, 0) + 1
        places.append((_MARGIN + _STEP * below, _BACKWARD_Y + _ROW * (taken[below] - 1)))
    return places


def _legend(problem: Problem, peak: int, cost: int, schedule: Schedule) -> Iterator[str]:
    again = len(schedule.ops) - len(set(schedule.ops))
    name = escape(problem.name or "problem")
    yield (
        f'<text x="{_MARGIN}" y="20">{name}: {len(problem.ops)} ops, {again} runs again, '
        f"peak {peak:,} {escape(problem.size_unit)}, cost {cost:,} "
        f"{escape(problem.cost_unit)}</text>"
    )
    words = {"forward": "forward", "loss": "loss", "backward": "backward", "again": "recomputed"}
    for k, (kind, word) in enumerate(words.items()):
        x = _MARGIN + 110 * k
        yield f'<rect x="{x}" y="32" width="10" height="10" fill="{_COLOURS[kind]}"/>'
        yield f'<text x="{x + 15}" y="42">{word}</text>'


def _blocks(problem: Problem, places: list[tuple[int, int]], lowest: int) -> Iterator[str]:
    rows = find_rows(problem)
    if isinstance(rows, str):
        return
    for ops in rows.forward[::2]:  # every second one is shaded
        xs = [places[i][0] for i in ops]
        left, right = min(xs) - _STEP // 2, max(xs) + _STEP // 2
        yield (
            f'<rect class="b" x="{left}" y="60" width="{right - left}" '
            f'height="{lowest - 60 + _ROW}"/>'
        )


def _edges(problem: Problem, places: list[tuple[int, int]]) -> Iterator[str]:
    for v, by in enumerate(problem.producer):
        if by < 0:
            continue
        for reader in problem.readers[v]:
            (x1, y1), (x2, y2) = places[by], places[reader]
            # Skips within a row bow out of it; to the other row a line is enough.
            bow = 0 if y1 != y2 else min(26, abs(x2 - x1) // 4)
            middle = (x1 + x2) // 2, (y1 + y2) // 2 - bow
            yield f'<path class="e" d="M{x1} {y1}Q{middle[0]} {middle[1]} {x2} {y2}"/>'


def _nodes(problem: Problem, places: list[tuple[int, int]], runs: tuple[int, ...]) -> Iterator[str]:
    for i, (op, (x, y)) in enumerate(zip(problem.ops, places, strict=True)):
        made = sum(problem.values[v].size for v in op.outputs)
        again = ' class="again"' if runs[i] > 1 else ""
        yield (
            f'<circle cx="{x}" cy="{y}" r="4" fill="{_COLOURS[_kind(problem, i)]}"{again}>'
            f"<title>{escape(op.name)}: {op.cost:,} {escape(problem.cost_unit)}, makes {made:,} "
            f"{escape(problem.size_unit)}, runs {runs[i]}</title></circle>"
        )


def _runs(
    problem: Problem, schedule: Schedule, memory: tuple[int, ...], width: int, top: int
) -> Iterator[str]:
    costs = [problem.ops[i].cost for i in schedule.ops]
    whole = sum(costs) or 1
    scale = (width - 2 * _MARGIN) / whole
    peak = max(memory, default=0) or 1
    bottom = top + _MEMORY
    seen: set[int] = set()
    at, line, bars = 0, [f"M{_MARGIN} {bottom}"], []
    for i, cost, used in zip(schedule.ops, costs, memory, strict=True):
        x, y = _MARGIN + scale * at, bottom - _MEMORY * used / peak
        at += cost
        line.append(f"L{x:.1f} {y:.1f}L{_MARGIN + scale * at:.1f} {y:.1f}")
        colour = _COLOURS["again" if i in seen else _kind(problem, i)]
        seen.add(i)
        bars.append(
            f'<rect x="{x:.1f}" y="{bottom + 6}" width="{max(0.4, scale * cost):.1f}" '
            f'height="{_BAR}" fill="{colour}"><title>{escape(problem.ops[i].name)}: {used:,} '
            f"{escape(problem.size_unit)} in use</title></rect>"
        )
    yield f'<text x="{_MARGIN}" y="{top - 8}">memory and runs over the step</text>'
    yield f'<path class="m" d="{"".join(line)}L{_MARGIN + scale * at:.1f} {bottom}Z"/>'
    yield from bars
