"""Numbers, tables and JSON as the commands print them."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rekindle.core import Problem

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ("ns", "us", "ms", "s")


def size(problem: Problem, amount: int) -> str:
    """`1.50 GiB`; a size in another unit than bytes stays a plain number."""
    if problem.size_unit != "bytes":
        return f"{amount:,} {problem.size_unit}"
    return _scaled(amount, _SIZES, 1024)


def cost(problem: Problem, amount: int) -> str:
    if problem.cost_unit != "ns":
        return f"{amount:,} {problem.cost_unit}"
    return _scaled(amount, _TIMES, 1000)


def overhead(new_cost: int, keep_all_cost: int) -> float:
    """The increase over keep-all, 0.07 for 7 %."""
    if keep_all_cost == 0:
        return 0.0
    return (new_cost - keep_all_cost) / keep_all_cost


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Columns wide enough for their cells; the first `left` stand left, the others right."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]

    def text(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if k < left else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([text(lines[0]), "  ".join("-" * w for w in widths), *map(text, lines[1:])])


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record))


def _scaled(amount: int, units: Sequence[str], step: int) -> str:
    value, k = float(amount), 0
    while k < len(units) - 1 and value >= step:
        value, k = value / step, k + 1
    return f"{amount} {units[0]}" if k == 0 else f"{value:.2f} {units[k]}"
