"""RESULTS.md and plots/MODEL.svg (time against memory) from the stored records of `compare.py` and
`bigger.py`.

    python benchmarks/gpu/tables.py

The page is INTRO.md, the tables that are made here, and PROVENANCE.md. A percentage is always of
the eager step in the same row, which was timed in the same run.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
GIB = 2**30
Record = dict[str, Any]

# What the page calls the models of `models.py`, and what they are given.
NAMES = {
    "convnext-base": "ConvNeXt-B",
    "diffusion-unet": "diffusion UNet",
    "fno3d": "FNO 3d",
    "gpt2-96-layers": "GPT-2, 96 layers",
    "gpt2-medium-bf16-sdpa": "GPT-2 medium, bf16",
    "gpt2-medium-fp32-eager": "GPT-2 medium, fp32",
    "llama-1b-1x16384": "Llama 1B, one sequence",
    "llama-1b-4x4096": "Llama 1B",
    "mixer-b16": "MLP-Mixer B/16",
    "regnet-x-32gf": "RegNet-X 32GF",
    "resnet1001": "ResNet-1001",
    "resnet101": "ResNet-101",
    "t5-base": "T5 base",
    "transformer-36-36": "nn.Transformer 36 + 36",
    "transformer-6-6": "nn.Transformer 6 + 6",
    "unet": "UNet",
    "vit-large": "ViT-L",
}
INPUTS = {
    "convnext-base": "64 images of 224",
    "diffusion-unet": "32 images of 64",
    "fno3d": "4 grids of 64 x 64 x 64",
    "gpt2-96-layers": "bf16, 4 x 512 tokens",
    "gpt2-medium-bf16-sdpa": "16 x 1024 tokens",
    "gpt2-medium-fp32-eager": "4 x 512 tokens",
    "llama-1b-1x16384": "bf16, 1 x 16384 tokens",
    "llama-1b-4x4096": "bf16, 4 x 4096 tokens",
    "mixer-b16": "64 images of 224",
    "regnet-x-32gf": "32 images of 224",
    "resnet1001": "128 images of 32",
    "resnet101": "64 images of 224",
    "t5-base": "16 x 512 tokens",
    "transformer-36-36": "64 x 200 tokens",
    "transformer-6-6": "64 x 200 tokens",
    "unet": "32 images of 256",
    "vit-large": "64 images of 224",
}
TITLES = {model: f"{name}, {INPUTS[model]}" for model, name in NAMES.items()}
PEERS = {
    "own": "gradient checkpointing",
    "blocks": "torch.utils.checkpoint",
    "sac": "selective checkpointing",
}
COMPILED = {f"inductor@{b}": b for b in ("1.0", "0.5", "0.25")}
METHODS = {
    "own": "gradient checkpointing, the model's own",
    "blocks": "torch.utils.checkpoint around each block",
    "sac": "selective checkpointing",
    "inductor@1.0": "torch.compile",
    "inductor@0.5": "torch.compile, activation_memory_budget 0.5",
    "inductor@0.25": "torch.compile, activation_memory_budget 0.25",
    "rekindle@1.0": "Rekindle, all of eager's memory",
    "rekindle@0.7": "Rekindle, 0.7 of it",
    "rekindle@0.5": "Rekindle, 0.5 of it",
    "rekindle@0.3": "Rekindle, 0.3 of it",
    "rekindle@own": "Rekindle, gradient checkpointing's memory",
    "rekindle@blocks": "Rekindle, torch.utils.checkpoint's memory",
    "graph@1.0": "Rekindle, CUDA graph",
    "graph@0.5": "Rekindle, CUDA graph, 0.5 of eager's memory",
}
# torch.compile ran together with Rekindle at 0.7, which timed eager too; these two ran with eager.
COMPILED_WITH = "rekindle@0.7"
COMPILED_WITH_EAGER = {("mixer-b16", "inductor@1.0"), ("transformer-6-6", "inductor@1.0")}
# Colours that stay apart for colour-blind readers, and a mark for each.
STYLES = {
    "eager": ("#000000", "o", "eager"),
    "own": ("#D55E00", "s", "gradient checkpointing, the model's own"),
    "blocks": ("#E69F00", "D", "torch.utils.checkpoint around each block"),
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


def eager_ms(record: Record, methods: Mapping[str, Record]) -> float:
    """The eager step of the same run."""
    kind = (record["model"], record["method"])
    if record["method"] in COMPILED and kind not in COMPILED_WITH_EAGER:
        record = {**methods.get(COMPILED_WITH, {}), **record}
    return float(record.get("eager_ms", methods["eager"]["ms"]))


def against(record: Record, methods: Mapping[str, Record]) -> float:
    """The time of a step as a multiple of eager's."""
    return float(record["ms"]) / eager_ms(record, methods)


def signed(times: float) -> str:
    text = f"{100 * (times - 1):+.1f} %"
    return text.replace("-0.0", "+0.0")


def cell(methods: Mapping[str, Record], *columns: str) -> str:
    """`+2.8 %, 7.07 GiB` of the first of these methods that ran."""
    for column in columns:
        record = methods.get(column, {})
        if "ms" in record:
            return f"{signed(against(record, methods))}, {record['peak_bytes'] / GIB:.2f} GiB"
    reasons = [r for c in columns if (r := reason(methods.get(c, {})))]
    return reasons[0] if reasons else "-"


def reason(record: Record) -> str:
    """Why a method has no numbers, where that says something about the method."""
    why = record.get("not_applicable") or record.get("error", "")
    return "no schedule fits" if "BudgetInfeasible" in why else ""


def markdown(models: Mapping[str, Mapping[str, Record]], intro: str) -> str:
    measured = {name: m for name, m in models.items() if "ms" in m.get("eager", {})}
    lines = [intro, "", "## At a glance", "", *checks(measured), "", OVERVIEW, ""]
    lines += ["| model | " + " | ".join(OVERVIEW_COLUMNS) + " |"]
    lines += ["|---" * (len(OVERVIEW_COLUMNS) + 1) + "|"]
    for name, methods in measured.items():
        eager = methods["eager"]
        cells = [f"{eager['ms']:.1f} ms, {eager['peak_bytes'] / GIB:.2f} GiB"]
        cells += [cell(methods, *columns) for columns in list(OVERVIEW_COLUMNS.values())[1:]]
        lines.append(f"| {TITLES[name]} | " + " | ".join(cells) + " |")
    lines += ["", "## Every model and method", "", EVERY]
    for name, methods in measured.items():
        lines += ["", f"### {TITLES[name]}", "", *rows_of(name, methods)]
    return "\n".join(lines) + "\n"


# Methods of a column: the first that ran.
OVERVIEW_COLUMNS: dict[str, tuple[str, ...]] = {
    "eager": ("eager",),
    "gradient checkpointing": ("own", "blocks"),
    "Rekindle, the same memory": ("rekindle@own", "rekindle@blocks"),
    "Rekindle, half of eager's memory": ("rekindle@0.5",),
    "Rekindle, all of eager's memory": ("rekindle@1.0",),
}
OVERVIEW = """Time of a step against eager's, and activation peak. Gradient checkpointing is the
model's own (`gradient_checkpointing_enable()` and the like), or `torch.utils.checkpoint` around
each block where the model has none. Below zero is faster than eager."""
EVERY = """Each row: the step, the eager step of the same run, their ratio, and the activation peak.
`--methods` chooses rows. Where the host is slower than the GPU, eager itself varies from run to
run; compare ratios there, not ms. Plots are in `plots/`."""


def rows_of(name: str, methods: Mapping[str, Record]) -> list[str]:
    eager = methods["eager"]
    lines = [f"`python benchmarks/gpu/compare.py --plan-limit 4 --models {name}`", ""]
    lines += ["| method | step, ms | eager, ms | against eager | peak, GiB | of eager's peak |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    peak = eager["peak_bytes"]
    lines += [f"| eager | {eager['ms']:.1f} | {eager['ms']:.1f} | | {peak / GIB:.2f} | 100 % |"]
    for method, title in METHODS.items():
        record = methods.get(method, {})
        if "ms" in record:
            lines.append(
                f"| {title} | {record['ms']:.1f} | {eager_ms(record, methods):.1f} "
                f"| {signed(against(record, methods))} | {record['peak_bytes'] / GIB:.2f} "
                f"| {100 * record['peak_bytes'] / peak:.0f} % |"
            )
        elif why := reason(record):
            lines.append(f"| {title} | {why} | | | | |")
    return lines


def checks(models: Mapping[str, Mapping[str, Record]]) -> list[str]:
    """What the numbers say about the promises, as a table."""
    ours = [
        (name, methods, r)
        for name, methods in models.items()
        for method, r in methods.items()
        if method.startswith("rekindle") and "ms" in r
    ]
    answers: list[tuple[str, str]] = []
    kept = [(against(r, m), n) for n, m, r in ours if r["method"] == "rekindle@1.0"]
    if kept:
        answers.append(("slowest step at all of eager's memory", most(kept, 1)))
    half = [(against(r, m), n) for n, m, r in ours if r["method"] == "rekindle@0.5"]
    if half:
        answers.append(("slowest steps at half of eager's memory", most(half, 4)))
    if shares := overhead_shares(models):
        text = "; ".join(f"{NAMES[n]} {100 * share:.0f} %" for share, n in shares)
        answers.append(
            (
                "at gradient checkpointing's memory, Rekindle's overhead as a share of "
                "checkpointing's (0 %: no slower than eager)",
                text,
            )
        )
    over = [n for n, _, r in ours if r["peak_bytes"] > r["budget_bytes"]]
    answers.append(
        (
            "plans whose measured peak is above the budget",
            f"{len(over)} of {len(ours)}" + "".join(f" ({NAMES[n]})" for n in over),
        )
    )
    if plans := [r["plan_s"] for _, _, r in ours]:
        answers.append(
            ("time to plan, profiling included", f"{min(plans):.1f} to {max(plans):.1f} s")
        )
    far = {n for n, _, r in ours if r["gradient_error"] > 10 * r["eager_to_itself"] + 1e-12}
    answers.append(
        (
            "models whose gradients are farther from eager's than eager's are from run to run",
            ", ".join(NAMES[n] for n in sorted(far)) or "none",
        )
    )
    beaten, open_ = dominated(models, PEERS)
    answers.append(
        (
            "checkpointing baselines that beat Rekindle in both memory and time, of "
            f"{sum('ms' in r for m in models.values() for k, r in m.items() if k in PEERS)}",
            listed(beaten),
        )
    )
    if open_:
        answers.append(("of these, below any budget that was measured", listed(open_)))
    compiled = sum("ms" in r for m in models.values() for k, r in m.items() if k in COMPILED)
    if compiled:
        faster, open_ = dominated(models, COMPILED)
        count = sum(len(budgets) for budgets in faster.values())
        answers.append(
            (
                "settings of torch.compile (activation_memory_budget) that beat Rekindle in both; "
                "its results differ from eager's in the last bits",
                f"{count} of {compiled}: {listed(faster)}",
            )
        )
        if open_:
            answers.append(("of these, below any budget that was measured", listed(open_)))
    for method, budget in COMPILED.items():
        peaks = [
            m[method]["peak_bytes"] / m["eager"]["peak_bytes"]
            for m in models.values()
            if "ms" in m.get(method, {})
        ]
        if peaks:
            text = f"{100 * min(peaks):.0f} to {100 * max(peaks):.0f} % of eager's"
            answers.append((f"torch.compile's peak at activation_memory_budget {budget}", text))
    return ["| question | answer |", "|---|---|", *(f"| {q} | {a} |" for q, a in answers)]


def most(found: list[tuple[float, str]], count: int) -> str:
    worst = sorted(found, reverse=True)[:count]
    return "; ".join(f"{NAMES[name]} {signed(times)}" for times, name in worst)


def overhead_shares(models: Mapping[str, Mapping[str, Record]]) -> list[tuple[float, str]]:
    """What Rekindle adds to a step at the memory of gradient checkpointing (the model's own, or of
    each block where it has none), as a share of what checkpointing adds."""
    found = []
    for name, methods in models.items():
        for switch in ("own", "blocks"):
            mine, theirs = methods.get(f"rekindle@{switch}", {}), methods.get(switch, {})
            if "ms" in mine and "ms" in theirs:
                more = against(theirs, methods) - 1
                found.append((max(against(mine, methods) - 1, 0.0) / more, name))
                break
    return sorted(found, reverse=True)


def dominated(
    models: Mapping[str, Mapping[str, Record]], peers: Mapping[str, str]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By model, peers that are faster than every point of ours that needs as little memory, and
    those for which there is no such point. Ours counts only if it is no slower in both ms and time
    against eager: the two can differ where eager varies from run to run."""
    beaten: dict[str, list[str]] = {}
    unknown: dict[str, list[str]] = {}
    for name, methods in models.items():
        mine = [r for m, r in methods.items() if m.startswith(("rekindle", "graph")) and "ms" in r]
        for method, peer in methods.items():
            if method in peers and "ms" in peer:
                smaller = [r for r in mine if r["peak_bytes"] <= peer["peak_bytes"]]
                theirs = against(peer, methods)
                if not any(
                    r["ms"] <= peer["ms"] and against(r, methods) <= theirs for r in smaller
                ):
                    (beaten if smaller else unknown).setdefault(name, []).append(peers[method])
    return beaten, unknown


def listed(found: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{NAMES[name]} at {', '.join(w)}" for name, w in found.items()) or "none"


BIGGER = """## Larger batches, sequences and images

The largest size at which two training steps (forward, backward, AdamW with its state) run within
the card's memory, enforced by `torch.cuda.set_per_process_memory_fraction`. In brackets: the next
size that was tried, which did not fit. Without brackets, no larger size was tried.

`python benchmarks/gpu/bigger.py`

| column | meaning |
|---|---|
| gradient checkpointing | the model's own, or `torch.utils.checkpoint` around each block |
| Rekindle | `device_budget=` the card, `optimizer="adamw"`, `headroom=0.02` |
| `3.1x` | multiple of eager's size, on the same card |
| overhead | recomputed time over the time of all ops once, predicted by the plan |
"""


def bigger(folder: Path) -> list[str]:
    """The largest sizes, by case and card; nothing where nothing was measured."""
    found: dict[tuple[str, float], dict[str, Record]] = {}
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text())
        found.setdefault((record["title"], record["card"]), {})[record["method"]] = record
    if not any("rekindle" in methods for methods in found.values()):
        return []
    lines = [
        "",
        BIGGER,
        "| largest | card, GiB | eager | gradient checkpointing | Rekindle | overhead |",
    ]
    lines.append("|---" * 6 + "|")
    for (title, card), methods in sorted(found.items()):
        if "rekindle" not in methods:
            continue
        cells = [size_cell(methods.get(m), methods.get("eager")) for m in ("eager", "own")]
        cells += [size_cell(methods.get("rekindle"), methods.get("eager"))]
        again = last_fit(methods.get("rekindle")).get("overhead")
        cells.append("" if again is None else f"{100 * again:.0f} %")
        lines.append(f"| {title} | {card:g} | " + " | ".join(cells) + " |")
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
    axes.set_title(TITLES[name])
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
    text += "\n" + (HERE / "PROVENANCE.md").read_text().strip() + "\n"
    args.out.write_text(text)
    if not args.no_plots:
        for name, methods in models.items():
            plot(name, methods, HERE / "plots" / f"{name}.svg")


if __name__ == "__main__":
    main()
