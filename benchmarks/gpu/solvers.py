"""Every method of the papers on the papers' models, run by the same runtime.

    python benchmarks/gpu/solvers.py --deadline 170 --out "$OUT/solvers.jsonl"
    python benchmarks/gpu/solvers.py --device cpu --small --limit 2 --out /tmp/s.jsonl
    python benchmarks/gpu/solvers.py --table --out benchmarks/gpu/solvers.jsonl

Models: those of HiRemate's Table 4 (benchmarks/hiremate/models.py) and GPT-2 medium with 4 x 512
tokens of Rockmate's App. E. Budgets: 50 and 30 % of the plain peak, the parameters'
gradients on top (`count_gradients=False`, as the papers count), and what checkpointing each block
needs. Each case is planned with a limit on the solver's time, runs some steps, and is measured:
peak, time of a step beside eager's, planning time; its gradients are compared bitwise.

One record is written as each case ends (JSON lines). A case that has one in `--out` or `--stored`
is not run again, so the same command goes on where the last one stopped. A case begins only before
`--deadline`, and cases that could not end by then get less time for their solver.
"""

import argparse
import copy
import functools
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rekindle
from rekindle.errors import RekindleError

HERE = Path(__file__).resolve().parent
SOLVERS = (
    "auto", "hiremate", "rockmate", "twremat", "rotor", "fastsa", "checkmate", "moccasin",
)  # fmt: skip
BUDGETS = ("0.5", "0.3", "blocks")
FIRST = ("Rockmate GPT-2 medium", "UNet", "ResNet-101", "Transformer 6-6", "GPT-24", "FNO 3d")
Record = dict[str, Any]
Sample = tuple[nn.Module, tuple[Any, ...]]


def factories(small: bool) -> dict[str, Callable[[], Sample]]:
    """The models by name, the most important first; `small` ones run on a CPU in a second."""
    path = HERE.parent / "hiremate" / "models.py"
    spec = importlib.util.spec_from_file_location("hiremate_models", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # Dynamo looks the classes up there
    spec.loader.exec_module(made)
    if small:
        return {
            "GPT": lambda: (made.GPT(3, 64, 4, 256), (torch.zeros(8, 64, dtype=torch.long),)),
            "ResNet-34": lambda: made.resnet34(batch=2, size=64),
        }

    def medium() -> Sample:
        return made.GPT(24, 1024, 16), (torch.zeros(4, 512, dtype=torch.long),)

    found = {"Rockmate GPT-2 medium": medium, **made.FACTORIES}
    return {name: found[name] for name in dict.fromkeys((*FIRST, *found))}


def longest_list(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model: the longest list of modules in it."""
    lists = [list(m) for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    return max(lists, key=len, default=[])


def checkpointed(model: nn.Module) -> nn.Module:
    """A copy whose blocks are checkpointed."""
    from torch.utils.checkpoint import checkpoint

    model = copy.deepcopy(model)
    for block in longest_list(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


class Cases:
    """The cases of one model."""

    def __init__(self, name: str, make: Callable[[], Sample], args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        torch.manual_seed(0)
        with torch.device(args.device):
            self.model, self.sample = make()
        self.model.train()
        self.eager = self.measured(self.model)
        self.gradients = self.seeded(self.model)

    def measured(self, model: nn.Module) -> dict[str, float]:
        seen = rekindle.measure(model, self.sample, num_steps=self.args.steps, num_warmup=2)
        return {"peak_bytes": seen.peak_bytes, "ms": seen.step_ns / 1e6}

    def seeded(self, model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        self.model.zero_grad(set_to_none=True)
        model(*self.sample).sum().backward()
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return found

    @functools.cached_property
    def blocks(self) -> dict[str, float]:
        return self.measured(checkpointed(self.model))

    def budget(self, asked: str) -> dict[str, Any]:
        if asked != "blocks":
            return {"budget": float(asked), "count_gradients": False}
        return {"budget": int(self.blocks["peak_bytes"])}

    def run(self, asked: str, solver: str, limit_s: float) -> Record:
        record: Record = {"model": self.name, "budget": asked, "solver": solver}
        record |= {"eager_peak": self.eager["peak_bytes"], "eager_ms": self.eager["ms"]}
        if asked == "blocks":
            record |= {"blocks_peak": self.blocks["peak_bytes"], "blocks_ms": self.blocks["ms"]}
        state = copy.deepcopy(self.model.state_dict())
        start = time.perf_counter()
        managed = rekindle.rematerialize(
            self.model, self.sample, solver=solver, time_limit_s=limit_s, **self.budget(asked)
        )
        plan = managed.plan
        record |= {
            "plan_s": round(time.perf_counter() - start, 2),
            "planned_overhead": plan.overhead,
            "planned_peak": plan.peak_bytes,
            "budget_bytes": plan.budget_bytes,
            "status": plan.status.name,
        }
        self.model.load_state_dict(state)
        ours = self.seeded(managed)
        self.model.load_state_dict(state)
        again = self.seeded(self.model)
        equal = [torch.equal(a, b) for a, b in zip(ours, again, strict=True)]
        record |= {"equal": all(equal), "eager_equal_to_itself": self._repeats(again, state)}
        return record | self.measured(managed)

    def _repeats(self, gradients: list[torch.Tensor], state: dict[str, Any]) -> bool:
        """Whether eager's own gradients are the same bits twice; else ours need not be."""
        self.model.load_state_dict(state)
        other = self.seeded(self.model)
        return all(torch.equal(a, b) for a, b in zip(gradients, other, strict=True))


def run_all(args: argparse.Namespace) -> None:
    """The cases that are missing, until the deadline."""
    end = time.monotonic() + args.deadline
    done = {key(r) for path in (args.out, args.stored) for r in records(path) if "error" not in r}
    for name, make in factories(args.small).items():
        wanted = [
            (budget, solver)
            for budget in args.budgets.split(",")
            for solver in args.solvers.split(",")
            if (name, budget, solver) not in done
        ]
        if (args.models and name not in args.models.split(",")) or not wanted:
            continue
        if time.monotonic() > end:
            return
        try:
            cases = Cases(name, make, args)
        except Exception as error:
            write(args.out, {"model": name, "budget": "", "solver": "", "error": brief(error)})
            continue
        for budget, solver in wanted:
            left = end - time.monotonic()
            if left <= 0:
                return
            try:
                record = cases.run(budget, solver, min(args.limit, max(1.0, left / 2)))
            except RekindleError as error:  # an answer: refused, or nothing within the budget
                record = {"model": name, "budget": budget, "solver": solver}
                record["none"] = brief(error)
            except Exception as error:
                record = {"model": name, "budget": budget, "solver": solver, "error": brief(error)}
            write(args.out, record)
        del cases
        gc.collect()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()


def brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def key(record: Record) -> tuple[str, str, str]:
    return record["model"], record["budget"], record["solver"]


def records(path: Path | None) -> list[Record]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def write(path: Path, record: Record) -> None:
    print(json.dumps(record)[:200], flush=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def table(found: list[Record]) -> str:
    """Measured overhead in percent of eager's time, with the peak in percent of eager's."""
    by = {key(r): r for r in found}
    rows = sorted({k[:2] for k in by if k[2]}, key=str)
    lines = ["| model | budget | " + " | ".join(SOLVERS) + " |"]
    lines.append("|---|---|" + "---|" * len(SOLVERS))
    for model, budget in rows:
        cells = []
        for solver in SOLVERS:
            record = by.get((model, budget, solver), {})
            if "ms" in record:
                slower = 100 * (record["ms"] / record["eager_ms"] - 1)
                peak = 100 * record["peak_bytes"] / record["eager_peak"]
                cells.append(f"{slower:+.1f} ({peak:.0f} %, {record['plan_s']:.0f} s)")
            else:
                cells.append("none" if "none" in record else "error" if "error" in record else "")
        lines.append(f"| {model} | {budget} | " + " | ".join(cells) + " |")
    times = [r["plan_s"] for r in found if "plan_s" in r]
    if times:
        lines.append(f"\nPlanning: median {statistics.median(times):.1f} s of {len(times)} cases.")
    bad = [key(r) for r in found if r.get("equal") is False and r["eager_equal_to_itself"]]
    lines.append(f"Gradients that differ where eager repeats itself: {bad or 'none'}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for each solver")
    parser.add_argument("--deadline", type=float, default=170.0, help="seconds for this call")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", default="")
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--out", type=Path, default=HERE / "solvers.jsonl")
    parser.add_argument("--stored", type=Path, default=HERE / "solvers.jsonl")
    parser.add_argument("--table", action="store_true", help="print what is stored, run nothing")
    args = parser.parse_args()
    if not args.table:
        run_all(args)
    print(table(records(args.out)))


if __name__ == "__main__":
    sys.exit(main())
