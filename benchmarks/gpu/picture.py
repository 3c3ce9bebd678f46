"""The README's picture: step time against memory for Llama 1B, every method, from stored results.

python benchmarks/gpu/picture.py     # writes docs/assets/llama-memory-time.svg
"""

import argparse
from pathlib import Path

from tables import GIB, HERE, Record, against, load

MODEL = "llama-1b-4x4096"
OUT = HERE.parents[1] / "docs" / "assets" / "llama-memory-time.svg"
# Method, colour (apart for colour-blind readers), mark, label, offset of the label in points.
PEERS = (
    ("eager", "#000000", "o", "eager PyTorch", (0, -17), "center"),
    ("own", "#D55E00", "s", "gradient checkpointing", (9, -3), "left"),
    ("sac", "#CC79A7", "^", "selective checkpointing", (2, 9), "left"),
)
CURVES = (
    ("inductor", "#56B4E9", "v", "torch.compile with\nactivation_memory_budget"),
    ("rekindle", "#0072B2", "o", "Rekindle,\none point per budget"),
)


def curve(methods: dict[str, Record], kind: str) -> list[tuple[float, float]]:
    found = [r for m, r in methods.items() if m.startswith(f"{kind}@") and "ms" in r]
    return sorted((r["peak_bytes"] / GIB, 100 * (against(r, methods) - 1)) for r in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    out = parser.parse_args().out
    import matplotlib

    matplotlib.use("agg" if out.suffix == ".png" else "svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": MODEL, "svg.fonttype": "none", "axes.axisbelow": True})
    methods = load(HERE / "results")[MODEL]
    figure, axes = plt.subplots(figsize=(7.2, 3.9))
    for method, colour, mark, label, offset, side in PEERS:
        record = methods[method]
        x, y = record["peak_bytes"] / GIB, 100 * (against(record, methods) - 1)
        axes.plot(x, y, mark, color=colour, markersize=8)
        axes.annotate(label, (x, y), offset, textcoords="offset points", color=colour, ha=side)
    for kind, colour, mark, label in CURVES:
        points = curve(methods, kind)
        axes.plot(*zip(*points, strict=True), f"-{mark}", color=colour, linewidth=2)
        x, y = points[-1] if kind == "inductor" else points[1]
        offset, side = ((8, -4), "left") if kind == "inductor" else ((-6, -24), "right")
        axes.annotate(label, (x, y), offset, textcoords="offset points", color=colour, ha=side)
    axes.axhline(0, color="#888888", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 36)
    axes.set_xlabel("activation peak of a training step, GiB")
    axes.set_ylabel("step time against eager, %")
    axes.set_title("Llama 1B, bf16, 4 x 4096 tokens, one H200: lower and further left is better")
    axes.title.set_fontsize(10)
    axes.grid(color="#eeeeee")
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    figure.tight_layout()
    metadata = {} if out.suffix == ".png" else {"Date": None}
    figure.savefig(out, metadata=metadata, dpi=150)


if __name__ == "__main__":
    main()
