"""Compiled kernels under our schedules against torch.compile: step time, peak, kernel launches.

    python benchmarks/gpu/compiled.py --jobs 5 --deadline 170        # what has no record yet
    python benchmarks/gpu/compiled.py --models unet,resnet101 --again
    python benchmarks/gpu/compiled.py --table
    python benchmarks/gpu/compiled.py --device cpu --small --records /tmp/try.jsonl   # the script

Per model, in one process: eager; torch.compile with everything kept; Rekindle with
`kernels="inductor"` and everything kept; then budgets of 0.5 and 0.25 of torch.compile's measured
peak. A record is a line of `--records`; a model whose records are all there is not run again, but
by `--again`. Compiling is done beside others, measuring alone. After `--deadline` seconds what runs
is ended, and the same command goes on another time.
"""

import argparse
import gc
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from compare import run_all  # noqa: E402
from methods import alone, beside_others, distance, gradients, measure, step  # noqa: E402
from models import MODELS, Workload  # noqa: E402

# The most telling first.
FIRST = (
    *("gpt2-medium-bf16-sdpa", "resnet101", "unet", "gpt2-medium-fp32-eager", "vit-large"),
    *("mixer-b16", "t5-base", "llama-1b-4x4096"),
)
CASES = ("eager", "compile", "rekindle@1.0", "rekindle@0.5", "rekindle@0.25")
GIB = 2**30
Record = dict[str, Any]


def launches(run: Callable[[], Any], device: str) -> int | None:
    """How many kernels and copies a step puts on the device."""
    if not device.startswith("cuda"):
        return None
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return sum(1 for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA)


def host_ms(run: Callable[[], Any], device: str) -> float | None:
    """How long the host needs to issue a step."""
    if not device.startswith("cuda"):
        return None
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        times.append((time.perf_counter() - begun) * 1e3)
    torch.cuda.synchronize()
    return min(times)


class Case:
    """The cases of one model."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args, self.device = name, args, args.device
        torch.manual_seed(0)
        with beside_others(self.device):
            self.load: Workload = MODELS[name](args.device, args.small)
        self.known: dict[str, Record] = {}
        self.gradients: dict[str, list[torch.Tensor]] = {}

    def run(self) -> None:
        for case in CASES:
            begun = time.perf_counter()
            try:
                found = self._case(case)
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"[:600]}
            self.known[case] = found
            record = {"model": self.name, "case": case, "torch": torch.__version__} | found
            record["case_s"] = time.perf_counter() - begun
            with self.args.records.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(line(record), flush=True)
            gc.collect()
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()

    def _case(self, case: str) -> Record:
        begun = time.perf_counter()
        notes: Record = {}
        model: Any = self.load.model
        if case == "compile":
            model = torch.compile(self.load.model)
            with beside_others(self.device):
                self._seeded(model)
            notes["compile_s"] = time.perf_counter() - begun
        elif case != "eager":
            model, notes = self._planned(float(case.partition("@")[2]))
        with alone(self.device):
            made = self._seeded(model)
            if case == "eager":
                self.gradients["eager"] = made
                notes["again"] = distance(made, self._seeded(model))
            else:
                notes["to_eager"] = distance(self.gradients["eager"], made)
            del made
            run = lambda: step(model, self.load)  # noqa: E731
            notes |= measure(run, self.load, self.device, self.args.repeats, None)
            notes["launches"] = launches(run, self.device)
            notes["host_ms"] = host_ms(run, self.device)
        return notes

    def _seeded(self, model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        step(model, self.load)
        return gradients(self.load)

    def _planned(self, share: float) -> tuple[Any, Record]:
        import rekindle

        heard = Heard()
        call = {"args": self.load.args, "kwargs": self.load.kwargs, "kernels": "inductor"}
        call["hold_outputs"] = not self.load.loss_inside
        notes: Record = {}
        budget: float | int = share
        how: Record = {"best_effort": True, "time_limit_s": self.args.plan_limit}
        if share == 1.0:
            begun = time.perf_counter()
            with beside_others(self.device):
                rekindle.plan(
                    self.load.model, **call, budget=1.0, solver="keep-all", profile="estimate"
                )
            notes["compile_s"] = time.perf_counter() - begun
            how = {"solver": "keep-all"}
        elif "peak_bytes" in self.known["compile"]:
            budget = int(share * self.known["compile"]["peak_bytes"])
        begun = time.perf_counter()
        with alone(self.device):
            managed = rekindle.rematerialize(self.load.model, **call, budget=budget, **how)
        plan = managed.plan
        return managed, notes | {
            "plan_s": time.perf_counter() - begun,
            "kernels": plan.joint.kernels,
            "num_ops": len(plan.problem.ops),
            "num_steps": len(plan.schedule),
            "budget_bytes": plan.budget_bytes,
            "planned_peak_bytes": plan.predict().peak_bytes,
            "planned_ms": plan.predict().step_ns / 1e6,
            "planned_overhead": plan.overhead,
            "status": str(plan.status),
            "said": heard.lines(),
        }


class Heard(logging.Handler):
    """The warnings of one plan."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []
        logging.getLogger("rekindle").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage()[:400])

    def lines(self) -> list[str]:
        logging.getLogger("rekindle").removeHandler(self)
        return self.found


def line(r: Record) -> str:
    head = f"{r['model']:24} {r['case']:14}"
    if "ms" not in r:
        return f"{head} {r.get('error', '')[:300]}"
    text = f"{head} {r['ms']:9.2f} ms {r.get('peak_bytes', 0) / GIB:7.3f} GiB"
    text += f" launches {r['launches']} host {r['host_ms'] or 0:.1f} ms"
    if "planned_peak_bytes" in r:
        text += (
            f" [{r['kernels']}: planned {r['planned_ms']:.2f} ms"
            f" {r['planned_peak_bytes'] / GIB:.3f} GiB of {(r['budget_bytes'] or 0) / GIB:.3f},"
            f" {r['num_steps'] - r['num_ops']} repeats] plan {r['plan_s']:.1f} s"
        )
    if "compile_s" in r:
        text += f" compiled in {r['compile_s']:.0f} s"
    if "to_eager" in r:
        text += f" gradients {r['to_eager']:.1e}"
    return text + "".join(f"\n    {said}" for said in r.get("said", ()))


def records(path: Path) -> list[Record]:
    """The last record of each case."""
    if not path.exists():
        return []
    found = [json.loads(text) for text in path.read_text().splitlines()]
    return list({(r["model"], r["case"]): r for r in found}.values())


def is_done(name: str, path: Path) -> bool:
    done = {r["case"] for r in records(path) if r["model"] == name and "error" not in r}
    return done >= set(CASES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(FIRST))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--plan-limit", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=float("inf"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    out = Path(os.environ.get("OUT", HERE / "results"))
    parser.add_argument("--records", type=Path, default=out / "compiled.jsonl")
    parser.add_argument("--one", action="store_true", help="run these in this process")
    args = parser.parse_args()
    names = args.models.split(",")
    if args.table:
        print("\n".join(line(r) for r in records(args.records)))
        return
    if args.one:
        for name in names:
            try:
                Case(name, args).run()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
            torch._dynamo.reset()
        return
    due = [n for n in names if args.again or not is_done(n, args.records)]
    passed = [a for a in sys.argv[1:] if a != "--again"]
    commands = [[sys.executable, __file__, *passed, "--one", "--models", name] for name in due]
    run_all(commands, args.jobs, time.monotonic() + args.deadline)
    print("\n".join(line(r) for r in records(args.records)))


if __name__ == "__main__":
    main()
