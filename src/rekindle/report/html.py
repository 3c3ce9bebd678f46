"""The account as one page: a single HTML file that needs nothing from anywhere.

Names of modules and ops are data: the template escapes all of them, and what the script reads
stands as JSON in which no tag can open. A policy in the page forbids every connection.
"""

import functools
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from rekindle.core.disk import write_text
from rekindle.report import format
from rekindle.report.account import KINDS, Account, Step
from rekindle.report.module_paths import shown
from rekindle.report.module_table import Row, module_rows
from rekindle.report.text import MAX_ALIVE, alive_cells, verdict
from rekindle.report.timeline import (
    Timeline,
    View,
    call_of,
    lane_names,
    lane_of,
    numbered_texts,
    timeline,
)

MAX_INPUTS = 4  # with their shapes, below the title
FIRST_ALIVE = 8  # shown at once; the others on demand
OPEN_ROWS = 30  # of the table by module: deeper levels start closed
SCRIPTS = ("amounts", "stack", "pointer", "curve", "table")
_EXACT = 2**20  # stacks are given to one part in this many of the peak


def write_page(account: Account, path: str | os.PathLike[str]) -> Path:
    """Writes the page; returns where it is."""
    write_text(path, page(account))
    return Path(path)


def page(account: Account) -> str:
    """The whole file."""
    problem, facts = account.problem, account.facts
    rows = module_rows(account)
    alive = account.alive_at_peak
    return _template().render(
        title=problem.name or "training step",
        subtitle=_subtitle(account),
        verdict=verdict(account),
        device=_device(account),
        proof=account.gap,
        state={True: "fits", False: "over", None: "plain"}[account.fits],
        tiles=_tiles(account),
        data=_embedded(_data(account, timeline(account))),
        css=Markup(_file("uPlot.min.css") + _file("page.css")),
        uplot=Markup(_file("uPlot.iife.min.js")),
        licence=_file("uPlot-LICENSE.txt"),
        script=Markup(_script()),
        rows=_table(account, rows),
        has_loss=account.turn is not None,
        alive=[alive_cells(account, item) for item in alive[:MAX_ALIVE]],
        alive_shares=[_share(item.num_bytes, account.trace.peak) for item in alive[:MAX_ALIVE]],
        first_alive=FIRST_ALIVE,
        more_alive=len(alive[MAX_ALIVE:]),
        more_bytes=format.size(problem, sum(item.num_bytes for item in alive[MAX_ALIVE:])),
        peak=format.size(problem, account.trace.peak),
        peak_at=_peak_at(account),
        has_curve=len(facts.curve) > 1,
        has_bounds=any(point.bound is not None for point in facts.curve),
        trust=_trust(account),
        facts=facts,
        made=_made(account),
    )


def _subtitle(account: Account) -> str:
    """What was planned, and for which device."""
    facts = account.facts
    inputs = [f"{name}: {shape}" for name, shape in facts.inputs]
    if len(inputs) > MAX_INPUTS:
        inputs[MAX_INPUTS:] = [f"and {len(inputs) - MAX_INPUTS} more inputs"]
    return " · ".join(filter(None, (", ".join(inputs), facts.device and f"for {facts.device}")))


def _device(account: Account) -> dict[str, Any] | None:
    """A bar of all that is on the device: what is resident, the step, and what is left."""
    problem, facts = account.problem, account.facts
    if not facts.residents:
        return None
    step = account.trace.peak if facts.predicted is None else facts.predicted.peak_bytes
    parts = [(name, amount, str(k)) for k, (name, amount) in enumerate(facts.residents)]
    parts.append(("this step at its peak", step, "step"))
    used = sum(amount for _, amount, _ in parts)
    whole = facts.device_bytes or used
    sentence = f"{format.size(problem, used)} at the peak"
    if facts.device_bytes is not None:
        left = facts.device_bytes - used
        sentence += f" of the {format.size(problem, facts.device_bytes)} of {facts.device}"
        sentence += "." if left >= 0 else f": {format.size(problem, -left)} too much."
        if left > 0:
            parts.append(("free, also for what is outside this plan", left, "free"))
    hint = ""
    if not any(name.startswith("optimizer") for name, _ in facts.residents):
        hint = 'No optimizer was given, so its state is not in here: optimizer="adamw" counts it.'
    return {
        "sentence": sentence,
        "hint": hint,
        "parts": [
            {
                "name": name,
                "size": format.size(problem, amount),
                "share": _share(amount, max(whole, used)),
                "colour": colour,
            }
            for name, amount, colour in parts
        ],
    }


def _peak_at(account: Account) -> str:
    step = account.trace.peak_step
    if step < 0:
        return "nothing runs"
    place = account.places[account.op_of_step[step]]
    call = call_of(account, step)
    return f"step {step} of {len(account.schedule)}: {call} in {shown(place.module)}"


def _tiles(account: Account) -> list[tuple[str, str, str]]:
    """What a reader wants first: name, figure, remark."""
    problem, facts, trace, base = account.problem, account.facts, account.trace, account.base

    def size(amount: int) -> str:
        return format.size(problem, amount)

    of_all = format.percent(trace.peak / base.peak) if base.peak else "-"
    found = [("Peak memory", size(trace.peak), f"{of_all} of keep-all's {size(base.peak)}")]
    if facts.budget is not None:
        left = facts.budget - trace.peak
        remark = f"{size(left)} left" if left >= 0 else f"{size(-left)} too much"
        found.append(("Budget", size(facts.budget), remark))
    # A schedule may even be cheaper than keep-all: it need not run what nobody reads.
    extra = max(0, trace.cost - base.cost)
    found.append(
        (
            "Extra time",
            format.signed_percent(account.overhead),
            f"{format.cost(problem, extra)} on {format.cost(problem, base.cost)}",
        )
    )
    again = format.counted(trace.num_recomputed, "op")
    found.append(("Recomputed", again, f"of {format.counted(len(problem.ops), 'op')}"))
    if account.schedule.transfers:
        sent, _ = account.moved
        host = f"{size(trace.host_peak)} in host memory at most"
        found.append(("Moved to the host", size(sent), host))
    if facts.bound is not None:
        least = format.overhead(facts.bound, base.cost)
        found.append(("Lower bound", format.signed_percent(least), account.gap))
    return found


def _table(account: Account, rows: Sequence[Row]) -> list[dict[str, Any]]:
    problem = account.problem
    # Rows come in depth-first order, so the last row of each depth is the parent of what follows.
    above: list[int] = []  # the row of each depth that the next deeper one belongs to
    depth = max((d for d in range(12) if sum(r.depth <= d for r in rows) <= OPEN_ROWS), default=1)
    found = []
    for k, row in enumerate(rows):
        del above[row.depth :]
        following = rows[k + 1].depth if k + 1 < len(rows) else 0
        found.append(
            {
                "id": k,
                "parent": above[-1] if above else -1,
                "depth": row.depth,
                "has_parts": following > row.depth,
                "open": row.depth < depth,
                "hidden": row.depth > depth,
                "label": row.label,
                "path": row.path,
                "times": row.num_modules,
                "saved": format.size(problem, row.saved),
                "saved_raw": row.saved,
                "share": _share(row.saved, row.keep_all_saved),
                "kept": format.size(problem, row.keep_all_saved),
                "kept_raw": row.keep_all_saved,
                "again": row.num_recomputed,
                "extra": format.cost(problem, row.extra_cost) if row.extra_cost else "-",
                "extra_raw": row.extra_cost,
                "why": row.why,
            }
        )
        above.append(k)
    return found


def _share(part: int, whole: int) -> str:
    """For the width of a bar, in percent."""
    return f"{min(100.0, 100 * part / whole):.1f}" if whole else "0"


def _trust(account: Account) -> list[tuple[str, str, str, str]]:
    """Predicted against measured: what, predicted, measured, difference."""
    problem, facts = account.problem, account.facts
    # A problem file has no device: the simulated numbers stand for the predicted ones.
    predicted = facts.predicted or Step(account.trace.peak, account.trace.cost)
    measured = facts.measured
    if measured is None:
        return []
    return [
        (
            "peak",
            format.size(problem, predicted.peak_bytes),
            format.size(problem, measured.peak_bytes),
            _difference(predicted.peak_bytes, measured.peak_bytes),
        ),
        (
            "time of a step",
            format.cost(problem, predicted.step_ns),
            format.cost(problem, measured.step_ns),
            _difference(predicted.step_ns, measured.step_ns),
        ),
    ]


def _difference(predicted: int, measured: int) -> str:
    if not measured:
        return "-"
    return format.signed_percent((predicted - measured) / measured)


def _made(account: Account) -> list[tuple[str, str]]:
    problem, facts, record = account.problem, account.facts, account.record()
    found = [
        ("problem", f"{len(problem.ops)} ops, {len(problem.values)} values"),
        ("sha256 of the problem", record["problem_hash"]),
        ("solver", facts.solver or "not recorded"),
        ("optimality", account.gap),
    ]
    if facts.budget is not None:
        found.insert(2, ("budget", f"{facts.budget:,} {problem.size_unit}"))
    found += [(f"input {name}", shape) for name, shape in facts.inputs]
    return [*found, *facts.made_for]


# ---- what the script reads


def _data(account: Account, line: Timeline) -> dict[str, Any]:
    problem, facts, trace = account.problem, account.facts, account.trace
    # Names repeat a thousand times over: the page holds each once, and numbers.
    texts, number = numbered_texts()
    ops = [account.op_of_step[t] for t in line.steps]
    return {
        "unit": {"size": problem.size_unit, "cost": problem.cost_unit},
        "numSteps": len(account.schedule),
        "cost": trace.cost,
        "peak": trace.peak,
        "peakStep": trace.peak_step,
        "turn": account.turn,
        "budget": facts.budget,
        "keepAllPeak": account.base.peak,
        "keepAllCost": account.base.cost,
        "measured": None if facts.measured is None else facts.measured.peak_bytes,
        "steps": line.steps,
        "starts": line.starts,
        "memory": line.memory,
        "keepAll": line.keep_all,
        "until": line.until,
        "again": line.again,
        "call": [number(call_of(account, t)) for t in line.steps],
        "module": [number(shown(account.places[i].module)) for i in ops],
        "lane": [lane_of(account, t) for t in line.steps],
        "texts": texts,
        "views": [_view(view, trace.peak) for view in line.views],
        "kinds": KINDS,
        "lanes": line.lanes,
        "laneNames": lane_names(account),
        "curve": [[p.peak, p.cost, p.bound] for p in facts.curve],
        "segments": [[p.peak, p.cost] for p in facts.segments],
    }


def _view(view: View, peak: int) -> dict[str, Any]:
    """Stacks in whole units of a power of two: a picture needs no more, and digits are bytes."""
    # A power of two: the script multiplies back exactly in doubles.
    unit = 1
    while peak // unit > _EXACT:
        unit *= 2
    return {
        "name": view.name,
        "bands": view.bands,
        "unit": unit,
        "stacks": [[(x + unit // 2) // unit for x in row] for row in view.stacks],
    }


def _embedded(data: dict[str, Any]) -> Markup:
    """JSON for a script element: no `<` in it, so no tag can open or close there."""
    # `&` needs no escape: a script element is raw text in HTML.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c"))


def _script() -> str:
    """The parts of the page's script, in one function: none of its names is a global one."""
    parts = "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{parts}}})();\n'


def _file(name: str) -> str:
    return files("rekindle.report").joinpath("page", name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Template:
    environment = Environment(
        # A misspelled name raises instead of leaving a hole in the page.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(_file("page.html"))
