"""Stored results of `compare.py` and `bigger.py` as RESULTS.md and plots/MODEL.svg (time against
memory).

python benchmarks/gpu/tables.py
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GIB = 2**30
Record = dict[str, Any]

PEERS = {
    "own": "own block switch",
    "blocks": "checkpoint per block",
    "sac": "selective checkpoint",
}
COMPILED = {f"inductor@{b}": b for b in ("1.0", "0.5", "0.25")}
# Colours that stay apart for colour-blind readers, and a mark for each.
STYLES = {
    "eager": ("#000000", "o", "eager"),
    "own": ("#D55E00", "s", "the model's own block switch"),
    "blocks": ("#E69F00", "D", "torch.utils.checkpoint per block"),
    "sac": ("#CC79A7", "^", "selective checkpointing"),
    "inductor": ("#56B4E9", "v", "torch.compile (activation_memory_budget)"),
    "rekindle": ("#0072B2", "", "Rekindle"),
    "graph": ("#009E73", "", "Rekindle, CUDA graph"),
}


def load(folder: Path) -> dict[str, dict[str, Record]]:
    """By model and method."""
    found: dict[str, dict[str, Record]] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        found.setdefault(record["model"], {})[record["method"]] = record
    return found


def against(record: Record, eager: Record) -> float:
    """The time as a multiple of eager's, of the same minute where that was measured."""
    return float(record["ms"] / record.get("eager_ms", eager["ms"]))


def cell(record: Record | None, eager: Record) -> str:
    if record is None:
        return ""
    if "ms" not in record:
        reason = record.get("not_applicable") or record.get("error", "")
        return "out of reach" if "BudgetInfeasible" in reason else "-"
    more = 100 * (against(record, eager) - 1)
    return f"{record['ms']:.1f} ms ({more:+.1f} %), {record.get('peak_bytes', 0) / GIB:.2f}"


def markdown(models: Mapping[str, Mapping[str, Record]], intro: str) -> str:
    columns = ["own", "blocks", "sac", "inductor@1.0", "inductor@0.5", "inductor@0.25"]
    columns += ["rekindle@1.0", "rekindle@0.7", "rekindle@0.5", "rekindle@0.3"]
    columns += ["rekindle@own", "rekindle@blocks", "graph@1.0", "graph@0.5"]
    columns = [c for c in columns if any("ms" in m.get(c, {}) for m in models.values())]
    lines = [intro, "", "| model | eager | " + " | ".join(columns) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for name, methods in models.items():
        eager = methods.get("eager", {})
        if "ms" not in eager:
            continue
        first = f"{eager['ms']:.1f} ms, {eager.get('peak_bytes', 0) / GIB:.2f}"
        cells = [cell(methods.get(c), eager) for c in columns]
        lines.append(f"| {name} | {first} | " + " | ".join(cells) + " |")
    lines += ["", *checks(models)]
    return "\n".join(lines) + "\n"


def checks(models: Mapping[str, Mapping[str, Record]]) -> list[str]:
    """What the numbers say about the promises."""
    ours = [
        (name, methods["eager"], r)
        for name, methods in models.items()
        for method, r in methods.items()
        if method.startswith("rekindle") and "ms" in r and "ms" in methods.get("eager", {})
    ]
    kept = [(against(r, e), n) for n, e, r in ours if r["method"] == "rekindle@1.0"]
    over = [n for n, _, r in ours if r["peak_bytes"] > r["budget_bytes"]]
    lines = []
    if kept:
        worst = max(kept)
        lines.append(f"- Everything kept: at most {worst[0]:.3f} of eager's time ({worst[1]}).")
    half = sorted(
        ((against(r, e) - 1, n) for n, e, r in ours if r["method"] == "rekindle@0.5"), reverse=True
    )
    if half:
        worst_half = ", ".join(f"{n} {100 * more:+.1f} %" for more, n in half[:6])
        lines.append(f"- At half of eager's memory, most time above eager's: {worst_half}.")
    shares = switch_shares(models)
    if shares:
        text = ", ".join(f"{n} {100 * share:.0f} %" for share, n in shares)
        lines.append(f"- At the memory of a block switch, of the time that it adds: {text}.")
    lines.append(
        f"- Measured peak above the budget in {len(over)} of {len(ours)} cases"
        + (f" ({', '.join(over)})." if over else ".")
    )
    plans = [r["plan_s"] for _, _, r in ours]
    if plans:
        lines.append(f"- Planning with profiling: {min(plans):.1f} to {max(plans):.1f} s.")
    far = [n for n, _, r in ours if r["gradient_error"] > 10 * r["eager_to_itself"] + 1e-12]
    lines.append(
        "- Gradients are as near to eager's as eager's are to themselves"
        + (f", except in {', '.join(sorted(set(far)))}." if far else ".")
    )
    beaten, open_ = dominated(models, PEERS)
    lines.append(
        f"- A peer that is both smaller and faster than Rekindle's curve: {listed(beaten)}."
    )
    if open_:
        lines.append(f"- Smaller than any budget that was measured: {listed(open_)}.")
    compiled = sum("ms" in r for m in models.values() for k, r in m.items() if k in COMPILED)
    if compiled:
        faster, open_ = dominated(models, COMPILED)
        count = sum(len(budgets) for budgets in faster.values())
        lines.append(
            "- torch.compile, whose kernels round otherwise than eager's, is smaller and faster "
            f"than Rekindle's curve in {count} of {compiled} cases (by activation_memory_budget): "
            f"{listed(faster)}."
            + (f" Smaller than any budget that was measured: {listed(open_)}." if open_ else "")
        )
    for method, budget in COMPILED.items():
        peaks = [
            m[method]["peak_bytes"] / m["eager"]["peak_bytes"]
            for m in models.values()
            if "ms" in m.get(method, {}) and "ms" in m.get("eager", {})
        ]
        if peaks:
            lines.append(
                f"- torch.compile's peak at activation_memory_budget {budget}: "
                f"{100 * min(peaks):.0f} to {100 * max(peaks):.0f} % of eager's."
            )
    return lines


def switch_shares(models: Mapping[str, Mapping[str, Record]]) -> list[tuple[float, str]]:
    """What Rekindle adds to a step at the memory of the model's own switch, or of checkpointing
    each block where it has none, as a share of what that adds."""
    found = []
    for name, methods in models.items():
        eager = methods.get("eager", {})
        for switch in ("own", "blocks"):
            mine, theirs = methods.get(f"rekindle@{switch}", {}), methods.get(switch, {})
            if "ms" in mine and "ms" in theirs and "ms" in eager:
                more = against(theirs, eager) - 1
                found.append((max(against(mine, eager) - 1, 0.0) / more, name))
                break
    return sorted(found, reverse=True)


def dominated(
    models: Mapping[str, Mapping[str, Record]], peers: Mapping[str, str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By model, peers that are faster, by eager's time, than every point of ours that needs as
    little memory, and those for which there is no such point."""
    beaten: dict[str, list[str]] = {}
    unknown: dict[str, list[str]] = {}
    for name, methods in models.items():
        mine = [r for m, r in methods.items() if m.startswith(("rekindle", "graph")) and "ms" in r]
        for method, peer in methods.items():
            if method in peers and "ms" in peer:
                smaller = [r for r in mine if r["peak_bytes"] <= peer["peak_bytes"]]
                theirs = against(peer, methods.get("eager", peer))
                if not any(against(r, methods.get("eager", r)) <= theirs for r in smaller):
                    (beaten if smaller else unknown).setdefault(name, []).append(peers[method])
    return beaten, unknown


def listed(found: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{name} {', '.join(which)}" for name, which in found.items()) or "none"


BIGGER = """## Bigger, not only smaller

The largest size of which two whole steps (forward, backward, AdamW with its state) run in a process
held to the card's memory by `torch.cuda.set_per_process_memory_fraction`, found by
`python benchmarks/gpu/bigger.py` (records in `bigger/`). In brackets the next size that was tried
and did not run, 2 % or one grain above; where it is farther, or there is none, the search ended
before it had found the end. Block switch: the model's own, or torch.utils.checkpoint around each
block. Rekindle: `device_budget=` the card, headroom 2 %; recomputed is the time of ops that run
again by its own profile, which was taken while other cases ran beside it.
"""


def bigger(folder: Path) -> list[str]:
    """The largest sizes, by case and card; nothing where nothing was measured."""
    found: dict[tuple[str, float], dict[str, Record]] = {}
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text())
        found.setdefault((record["title"], record["card"]), {})[record["method"]] = record
    if not any("rekindle" in methods for methods in found.values()):
        return []
    lines = ["", BIGGER, "| largest | card | eager | block switch | Rekindle | recomputed |"]
    lines.append("|---" * 6 + "|")
    for (title, card), methods in sorted(found.items()):
        if "rekindle" not in methods:
            continue
        cells = [size_cell(methods.get(m), methods.get("eager")) for m in ("eager", "own")]
        cells += [size_cell(methods.get("rekindle"), methods.get("eager"))]
        again = last_fit(methods.get("rekindle")).get("overhead")
        cells.append("" if again is None else f"{100 * again:.0f} %")
        lines.append(f"| {title} | {card:g} GiB | " + " | ".join(cells) + " |")
    return lines


def size_cell(record: Record | None, eager: Record | None) -> str:
    """`48 (not 49), 4.0x`: the size, the next that does not fit, and how many times eager's."""
    if record is None or "size" not in record:
        return "" if record is None else "-"
    size, fails = record["size"], record["fails"]
    text = f"{size}" + ("" if fails is None else f" (not {fails})")
    if record is not eager and eager is not None and eager.get("size"):
        text += f", {size / eager['size']:.1f}x"
    if record["alone"] and (seconds := last_fit(record).get("step_s")):
        text += f", {seconds:.2f} s a step"
    return text


def last_fit(record: Record | None) -> Record:
    """The try that ran at the size of the record."""
    tries: list[Record] = (record or {}).get("tries", [])
    return next((t for t in tries if t["fits"] and t["size"] == record["size"]), {})


def plot(name: str, methods: Mapping[str, Record], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = name
    figure, axes = plt.subplots(figsize=(6, 3.6))
    series: dict[str, list[tuple[float, float]]] = {}
    for method, record in methods.items():
        if "ms" in record and record.get("peak_bytes"):
            kind = method.partition("@")[0]
            series.setdefault(kind, []).append((record["peak_bytes"] / GIB, record["ms"]))
    for kind, (colour, mark, label) in STYLES.items():
        points = sorted(series.get(kind, []))
        if points:
            x, y = zip(*points, strict=True)
            line = "-" if kind in ("rekindle", "graph", "inductor") else ""
            axes.plot(x, y, line, color=colour, marker=mark or ".", label=label)
    axes.set_xlabel("activation peak, GiB")
    axes.set_ylabel("step, ms")
    axes.set_title(name)
    axes.set_xlim(left=0)
    axes.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--bigger", type=Path, default=HERE / "bigger")
    parser.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    parser.add_argument("--no-plots", action="store_true")
    args = parser.parse_args()
    models = load(args.results)
    intro = (HERE / "INTRO.md").read_text().strip()
    text = markdown(models, intro) + "".join(f"{line}\n" for line in bigger(args.bigger))
    args.out.write_text(text)
    if not args.no_plots:
        for name, methods in models.items():
            plot(name, methods, HERE / "plots" / f"{name}.svg")


if __name__ == "__main__":
    main()
