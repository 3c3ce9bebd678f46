"""The figures of HiRemate (4, 6, 10 to 15) and Rockmate (4) on quick cases: data and plots.

    python benchmarks/hiremate/figures.py [--seconds 500] [--plot-only] [FIGURE ...]

Each point is one solve; what is already in `figures.json` is not done again, so the script can be
stopped and started as often as one likes; `--seconds` ends it before the next point. Plots are
`figures/FIGURE.svg` (matplotlib), `figures/README.md` lists them. Models are captured on meta
tensors with the roofline costs of `p100.toml` and kept under `build/hiremate`.

Depth (6) and alpha (10) are those of H-ILP alone, without the methods that ignore the hierarchy.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rekindle.core import Problem, keep_all, read_problem, simulate
from rekindle.partition.hierarchy import HPartition
from rekindle.partition.layer_graph import layer_graph, read_layers
from rekindle.solve import find_solver, run_solver
from rekindle.solve.base import Solver
from rekindle.solve.hierarchy.hiremate import HiRemate
from rekindle.solve.hierarchy.option_makers import ByTWRemat, keep_everything
from rekindle.solve.hierarchy.rockmate import ByCheckmate, Rockmate

HERE = Path(__file__).parent
PROBLEMS = HERE.parents[1] / "build" / "hiremate"
SHARES = (0.8, 0.6, 0.4)
HILP = HiRemate(makers=(keep_everything,), whole=(), max_flat=0, polish_moves=0)


@dataclass(frozen=True)
class Point:
    figure: str
    panel: str  # one plot of the figure
    line: str
    x: float
    model: str
    share: float  # of the keep-all peak
    solver: Solver
    time_limit_s: float = 40.0  # most end by themselves

    @property
    def key(self) -> str:
        return f"{self.figure} / {self.panel} / {self.line} / {self.x:g}"


@dataclass(frozen=True)
class Figure:
    title: str
    x: str
    points: Callable[[], Iterator[Point]]
    also: str = ""  # a second quantity of each point, in plots of its own


# -- models


def models() -> dict[str, Callable[[], tuple]]:
    """Every model that a figure asks for, by name."""
    import torch
    from models import Mixer, gpt, resnet34, transformer, unet

    made: dict[str, Callable[[], tuple]] = {
        "Mixer 64": lambda: (Mixer(), (torch.randn(64, 3, 256, 256),)),
        "GPT-12": lambda: gpt(12),
        "ResNet-34 64": lambda: resnet34(64),
    }
    for layers in (1, 2, 3, 4):
        made[f"Transformer {layers}-{layers}, 32 x 200"] = lambda n=layers: transformer(n)
    for batch, length in ((16, 200), (64, 200), (64, 100), (64, 300)):
        name = f"Transformer 1-1, {batch} x {length}"
        made[name] = lambda b=batch, n=length: transformer(1, b, n)
    for batch, size in ((16, 256), (32, 256), (64, 256), (64, 128), (64, 192)):
        made[f"UNet, {batch} x {size}"] = lambda b=batch, s=size: unet(b, s)
    return made


def load(model: str) -> Problem:
    path = PROBLEMS / f"{model.replace(' ', '_').replace(',', '')}.paper.json"
    if not path.exists():
        from capture import capture_model, without_gradients

        from rekindle.core import write_problem

        PROBLEMS.mkdir(parents=True, exist_ok=True)
        problem = capture_model(models()[model], model, str(HERE / "p100.toml"))
        write_problem(str(path), without_gradients(problem))
    return read_problem(path)


# -- points


def sizes() -> Iterator[Point]:
    """Fig. 4: encoder-decoder transformers of growing depth at 60 % of the memory."""
    for layers in (1, 2, 3, 4):
        for name in ("hiremate", "rockmate", "twremat", "checkmate", "moccasin"):
            if name in ("checkmate", "moccasin") and layers > 1:
                continue  # nothing within the limit
            yield Point(
                "fig4",
                "encoder-decoder transformer at 60 %",
                name,
                layers,
                f"Transformer {layers}-{layers}, 32 x 200",
                0.6,
                find_solver(name),
                time_limit_s=30.0,
            )


def depths() -> Iterator[Point]:
    """Fig. 6: smaller groups make a deeper hierarchy. H-ILP alone, and `hiremate` as it is."""
    panel, model = "encoder-decoder transformer, 3 layers", "Transformer 3-3, 32 x 200"
    for max_group in (8, 6, 4, 3, 2):
        partitioner = HPartition(max_top=8, max_group=max_group)
        alone = replace(HILP, partitioner=partitioner)
        for share in (0.6, 0.45):
            line = f"H-ILP, {share:.0%} of the memory"
            yield Point("fig6", panel, line, max_group, model, share, alone, 120.0)
        if max_group % 2 == 0 and max_group != 6:
            line, whole = "hiremate, 45% of the memory", HiRemate(partitioner=partitioner)
            yield Point("fig6", panel, line, max_group, model, 0.45, whole, 120.0)


def alphas() -> Iterator[Point]:
    for model in ("UNet, 32 x 256", "Transformer 1-1, 32 x 200"):
        for alpha in (0.0, 0.5, 1.0, 2.0):
            for share in (0.8, 0.6):
                partitioner = HPartition(alpha=alpha)
                solver = replace(HILP, partitioner=partitioner)
                yield Point("fig10", model, f"alpha {alpha:g}", share, model, share, solver)


def inputs(figure: str, *names: str) -> Callable[[], Iterator[Point]]:
    """Figs. 11 to 15: memory against time for models that differ in the size of their input."""

    def points() -> Iterator[Point]:
        for model in names:
            for share in SHARES:
                for name in ("hiremate", "twremat"):
                    yield Point(figure, model, name, share, model, share, find_solver(name))

    return points


def grids() -> Iterator[Point]:
    """Rockmate's Fig. 4: the number of (M_peak, M_save) budgets."""
    for model in ("GPT-12", "ResNet-34 64"):
        for count in (3, 5, 10, 20):
            makers = (ByTWRemat(1, 1), ByCheckmate(count, count, time_per_program_s=1.0))
            solver = Rockmate(makers=makers)
            yield Point("rockmate4", model, "50 % of the memory", count, model, 0.5, solver)


MEMORY = "memory, of plain"
TRANSFORMERS = [f"Transformer 1-1, {batch} x 200" for batch in (16, 32, 64)]
LENGTHS = [f"Transformer 1-1, 64 x {length}" for length in (100, 200, 300)]
FIGURES: dict[str, Figure] = {
    "fig4": Figure("HiRemate Fig. 4: graph size", "layers", sizes, also="wall_s"),
    "fig6": Figure("HiRemate Fig. 6: depth", "largest group", depths, also="levels"),
    "fig10": Figure("HiRemate Fig. 10: alpha", MEMORY, alphas),
    "fig11": Figure("HiRemate Fig. 11: batch", MEMORY, inputs("fig11", *TRANSFORMERS)),
    "fig12": Figure("HiRemate Fig. 12: length", MEMORY, inputs("fig12", *LENGTHS)),
    "fig13": Figure(
        "HiRemate Fig. 13: batch",
        MEMORY,
        inputs("fig13", *(f"UNet, {batch} x 256" for batch in (16, 32, 64))),
    ),
    "fig14": Figure(
        "HiRemate Fig. 14: resolution",
        MEMORY,
        inputs("fig14", *(f"UNet, 64 x {size}" for size in (128, 192, 256))),
    ),
    "fig15": Figure("HiRemate Fig. 15: MLP-Mixer", MEMORY, inputs("fig15", "Mixer 64")),
    "rockmate4": Figure("Rockmate Fig. 4: number of budgets", "budgets", grids, also="wall_s"),
}


def measure(point: Point, problem: Problem) -> dict[str, object]:
    plain = simulate(problem, keep_all(problem))
    found: dict[str, object] = {
        "figure": point.figure,
        "panel": point.panel,
        "line": point.line,
        "x": point.x,
        "ops": len(problem.ops),
        "overhead": None,
    }
    if isinstance(point.solver, HiRemate):
        graph = layer_graph(problem, read_layers(problem))
        found["levels"] = point.solver.partitioner.partition(graph).depth
    if point.solver.accepts(problem) is not None:
        return found
    cpu = time.process_time()
    budget = int(plain.peak * point.share)
    solution = run_solver(point.solver, problem, budget, time_limit_s=point.time_limit_s)
    found["wall_s"] = round(solution.wall_s, 1)
    found["cpu_s"] = round(time.process_time() - cpu, 1)
    found["stopped_by"] = solution.stopped_by
    if solution.schedule is not None:
        cost = simulate(problem, solution.schedule).cost
        found["overhead"] = round(100 * (cost / plain.cost - 1), 3)
    return found


# -- plots


def plot(name: str, rows: list[dict]) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": name})  # small, and repeatable
    from matplotlib import pyplot

    figure = FIGURES[name]
    panels = list(dict.fromkeys(row["panel"] for row in rows))
    quantities = ["overhead", *([figure.also] if figure.also else [])]
    labels = {"overhead": "overhead, %", "wall_s": "planning, s", "levels": "levels"}
    canvas, axes = pyplot.subplots(
        len(quantities),
        len(panels),
        figsize=(3.6 * len(panels) + 0.4, 2.7 * len(quantities)),
        squeeze=False,
    )
    for k, quantity in enumerate(quantities):
        for panel, axis in zip(panels, axes[k], strict=True):
            here = [row for row in rows if row["panel"] == panel]
            for line in dict.fromkeys(row["line"] for row in here):
                dots = sorted(
                    (row["x"], row[quantity])
                    for row in here
                    if row["line"] == line and row.get(quantity) is not None
                )
                axis.plot([x for x, _ in dots], [y for _, y in dots], marker="o", label=line, ms=3)
            if quantity == "wall_s":
                axis.set_yscale("log")
            axis.set_title(panel, fontsize=8)
            axis.set_xlabel(figure.x, fontsize=8)
            axis.set_ylabel(labels[quantity], fontsize=8)
            axis.tick_params(labelsize=7)
            axis.legend(fontsize=6)
    canvas.tight_layout()
    out = HERE / "figures"
    out.mkdir(exist_ok=True)
    canvas.savefig(out / f"{name}.svg", metadata={"Date": None})
    pyplot.close(canvas)


def in_words(rows: list[dict]) -> str:
    """Fig. 6 as a sentence: how much a deeper hierarchy costs."""
    parts = []
    for line in dict.fromkeys(row["line"] for row in rows):
        here = [row for row in rows if row["line"] == line and row["overhead"] is not None]
        first = here[0]
        worst = max(here, key=lambda row: row["overhead"])
        parts.append(
            f"{line}: {first['overhead']:.2f} % with {first['levels']} levels, at worst "
            f"{worst['overhead']:.2f} % with {worst['levels']}"
        )
    levels = [row["levels"] for row in rows]
    return f"Overhead from {min(levels)} to {max(levels)} levels. {'; '.join(parts)}."


def write_page(rows: dict[str, dict]) -> None:
    lines = ["# Figures", "", "Made by `figures.py` from `figures.json`.", ""]
    for name, figure in FIGURES.items():
        count = sum(row["figure"] == name for row in rows.values())
        if count:
            lines += [f"## {figure.title}", f"![{name}]({name}.svg) ({count} solves)", ""]
        if count and figure.also == "levels":
            lines += [in_words([row for row in rows.values() if row["figure"] == name]), ""]
    (HERE / "figures" / "README.md").write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--plot-only", action="store_true")
    parser.add_argument("names", nargs="*", default=list(FIGURES))
    options = parser.parse_intermixed_args()
    deadline = time.monotonic() + options.seconds
    out = HERE / "figures.json"

    def done() -> dict[str, dict]:
        """Read each time: the script may be at work on other figures elsewhere."""
        return json.loads(out.read_text()) if out.exists() else {}

    for name in options.names:
        for point in () if options.plot_only else FIGURES[name].points():
            if point.key in done():
                continue
            if time.monotonic() + point.time_limit_s > deadline:
                break
            row = measure(point, load(point.model))
            print(point.key, row, flush=True)
            out.write_text(json.dumps(done() | {point.key: row}, indent=1) + "\n")
        rows = done()
        here = [row for row in rows.values() if row["figure"] == name]
        if here:
            plot(name, here)
    write_page(done())


if __name__ == "__main__":
    main()
