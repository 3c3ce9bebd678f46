"""The account for a terminal: the verdict in one line, the tables of `explain`."""

from collections.abc import Iterable, Sequence
from typing import Any

from rekindle.errors import RekindleError
from rekindle.report import format
from rekindle.report.account import KINDS, Account, Alive
from rekindle.report.module_paths import shown
from rekindle.report.module_table import OWN, Row, module_row, module_rows
from rekindle.report.timeline import call_of

MAX_ALIVE = 20  # rows of the table of what is alive at the peak
MAX_ROWS = 40  # of the table by module: as deep as fits


def verdict(account: Account) -> str:
    """Whether it fits, the peak before and after, the extra time, what is proven: one line."""
    problem, trace, facts = account.problem, account.trace, account.facts

    def size(amount: int) -> str:
        return format.size(problem, amount)

    if facts.budget is None:
        start = "Peak"
    else:
        start = f"{'Fits' if account.fits else 'Does not fit'} {size(facts.budget)}: peak"
    again = trace.num_recomputed
    smallest = ""
    # A budget that is missed leaves the question what would fit.
    if account.fits is False and facts.curve:
        smallest = f"; the smallest peak found is {size(min(p.peak for p in facts.curve))}"
    return ", ".join(
        (
            f"{start} {size(trace.peak)} (was {size(account.base.peak)}{smallest})",
            f"{format.signed_percent(account.overhead)} time",
            f"{format.counted(again, 'op')} recomputed" if again else "nothing recomputed",
            account.gap,
        )
    )


def explain(account: Account) -> str:
    """What is saved and recomputed, by module and why, and what is alive at the peak."""
    problem = account.problem
    saved, kept = sum(account.saved), sum(account.base_saved)
    extra = account.trace.cost - account.base.cost
    lines = [verdict(account), ""]
    if account.turn is not None:
        lines.append(
            f"The forward leaves {format.size(problem, saved)} for the backward, of "
            f"{format.size(problem, kept)} when everything is kept; "
            f"{format.counted(account.trace.num_recomputed, 'op')} recomputed, "
            f"{format.cost(problem, max(0, extra))}."
        )
        lines.append("")
    if account.schedule.transfers:
        lines += [_moved(account), ""]
    rows = _shallow(module_rows(account))
    head = ("module", "saved", "of keep-all", "recomputed", "extra time", "why")
    lines.append(table(head, (_cells(account, row) for row in rows), right=(1, 2, 3, 4)))
    lines += ["", *_peak_lines(account)]
    if account.facts.advice:
        lines += ["", account.facts.advice]
    return "\n".join(lines)


def _moved(account: Account) -> str:
    """What goes to host memory and back, and how long the ops wait for it."""
    problem = account.problem
    sent, fetched = account.moved
    waits = account.starts[-1] - sum(problem.ops[i].cost for i in account.schedule.ops)
    num = sum(t.kind == "send" for t in account.schedule.transfers)
    return (
        f"{format.counted(num, 'value')} moved to host memory, {format.size(problem, sent)}, and "
        f"{format.size(problem, fetched)} fetched; at most "
        f"{format.size(problem, account.trace.host_peak)} there at one time; ops wait "
        f"{format.cost(problem, max(0, waits))}."
    )


def _shallow(rows: Sequence[Row]) -> list[Row]:
    """The rows down to the deepest level that fits."""
    # Cut by depth and not by number: half of a module's parts would read as all of them.
    for depth in range(12, 1, -1):
        found = [row for row in rows if row.depth <= depth]
        if len(found) <= MAX_ROWS:
            return found
    return [row for row in rows if row.depth <= 1]


def _cells(account: Account, row: Row) -> tuple[str, ...]:
    problem = account.problem
    name = "  " * row.depth + row.label
    return (
        f"{name} (x{row.num_modules})" if row.num_modules > 1 else name,
        format.size(problem, row.saved),
        format.size(problem, row.keep_all_saved),
        str(row.num_recomputed or "-"),
        format.cost(problem, row.extra_cost) if row.extra_cost else "-",
        row.why,
    )


def _peak_lines(account: Account) -> list[str]:
    step = account.trace.peak_step
    if step < 0:
        return ["Nothing runs."]
    problem = account.problem
    place = account.places[account.op_of_step[step]]
    alive = account.alive_at_peak
    lines = [
        f"Alive at the peak, {format.size(problem, account.trace.peak)} at step {step} of "
        f"{len(account.schedule)} ({call_of(account, step)} in {shown(place.module)}):"
    ]
    rows = [alive_cells(account, item) for item in alive[:MAX_ALIVE]]
    head = ("bytes", "count", "made by", "in", "what", "cost to recompute one")
    lines.append(table(head, rows, right=(0, 1, 5)))
    if len(alive) > MAX_ALIVE:
        rest = sum(item.num_bytes for item in alive[MAX_ALIVE:])
        lines.append(f"and {len(alive) - MAX_ALIVE} more, {format.size(problem, rest)}")
    return lines


def alive_cells(account: Account, item: Alive) -> tuple[str, ...]:
    """The cells of one line of what is alive at the peak."""
    problem = account.problem
    return (
        format.size(problem, item.num_bytes),
        f"{item.count} x {format.size(problem, item.bytes_each)}" if item.count > 1 else "1",
        item.call,
        item.modules,
        KINDS[item.kind],
        "-" if item.again_cost is None else format.cost(problem, item.again_cost),
    )


def explain_module(account: Account, module: str) -> str:
    """One module in one sentence."""
    row = module_row(account, module)
    if row is None:
        # The modules one level below the model are enough to see the naming.
        some = ", ".join(r.path for r in module_rows(account) if r.depth == 1 and r.label != OWN)
        some = some[:200]  # in an error message, which is one line
        raise RekindleError(f"no op stands in a module {module[:80]!r}; there are {some}")
    problem = account.problem
    return (
        f"{module}: {format.size(problem, row.saved)} saved for the backward of "
        f"{format.size(problem, row.keep_all_saved)}, "
        f"{format.counted(row.num_recomputed, 'op')} recomputed "
        f"({format.cost(problem, row.extra_cost)}); {row.why}."
    )


def explain_record(account: Account) -> dict[str, Any]:
    """All that `explain` says, as JSON data."""
    return {
        **account.record(),
        "verdict": verdict(account),
        "modules": [
            {
                "module": row.path,
                "depth": row.depth,
                "num_modules": row.num_modules,
                "num_ops": row.num_ops,
                "saved": row.saved,
                "keep_all_saved": row.keep_all_saved,
                "num_recomputed": row.num_recomputed,
                "extra_cost": row.extra_cost,
                "why": row.why,
            }
            for row in module_rows(account)
        ],
        "alive_at_peak": [
            {
                "modules": item.modules,
                "op": item.call,
                "kind": KINDS[item.kind],
                "count": item.count,
                "bytes_each": item.bytes_each,
                "bytes": item.num_bytes,
                "again_cost": item.again_cost,
            }
            for item in account.alive_at_peak
        ],
    }


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
    right: Sequence[int] | None = None,
) -> str:
    """Columns wide enough for their cells; those in `right`, else all but the first `left`, stand
    right."""
    # Widths count characters; names with wide characters misalign, which no command depends on.
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    flush = set(range(left, len(head)) if right is None else right)

    def text(line: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if k in flush else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([text(lines[0]), "  ".join("-" * w for w in widths), *map(text, lines[1:])])
