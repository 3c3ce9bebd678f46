r"""What the allocator reserves for a step, with and without segments of its own.

    python benchmarks/gpu/reserved.py --jobs 4 --deadline 170      # what has no record yet
    python benchmarks/gpu/reserved.py --jobs 4 --deadline 170 --records $OUT/reserved.jsonl \
        --traces $OUT/traces
    python benchmarks/gpu/reserved.py --models unet --again        # these once more
    python benchmarks/gpu/reserved.py --table                      # print what is stored
    python benchmarks/gpu/reserved.py --device cpu --small --records /tmp/try.jsonl

Per model: eager, and Rekindle at fractions of the keep-all peak and at the peak of the model's own
gradient checkpointing, with `arena=False` and with `arena=True`. Reserved is what a step takes from
the device above the segments that residents are in: from an empty cache, with the gaps in those
segments filled, after the steps that are watched and checked. Times alternate between the two.

`--traces FOLDER` leaves there, per case, the plan and the step's requests as the allocator recorded
them (a positive number: bytes; -k: the k-th request is given back): what the model of the allocator
makes of those is compared with what the allocator did, byte by byte.

One process per model, `--jobs N` at once; what is timed runs while nobody else uses the device.
Records are lines of `--records`. After `--deadline` seconds what runs is ended, and the same
command goes on another time.
"""

import argparse
import gc
import gzip
import json
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
from methods import NotApplicable, alone, beside_others, prepare, step, timed  # noqa: E402
from models import MODELS, Workload  # noqa: E402

BUDGETS = ("0.5", "0.3", "1.0", "own")
FIRST = (
    "resnet101", "unet", "transformer-6-6", "gpt2-medium-fp32-eager", "regnet-x-32gf", "mixer-b16",
    "diffusion-unet", "vit-large", "convnext-base", "gpt2-96-layers", "resnet1001",
)  # fmt: skip
NUM_WARM = 9  # watched, outside of the arena, checked in it
GIB, MIB = 2**30, 2**20
Record = dict[str, Any]


class Case:
    """A model, and what its steps take."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.device = torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        torch.manual_seed(0)
        self.load: Workload = MODELS[name](args.device, args.small)

    def record(self, budget: str, found: Record) -> None:
        record = {"model": self.name, "budget": budget, "torch": torch.__version__} | found
        with self.args.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(line(record), flush=True)

    def run(self, budgets: list[str]) -> None:
        with beside_others(self.args.device):
            eager = self.taken(self.load.model, "eager")
        with alone(self.args.device):
            eager["ms"] = self.ms(self.load.model)
        self.record("eager", {"off": eager})
        for budget in budgets:
            begun = time.perf_counter()
            try:
                found = self.under(budget)
            except NotApplicable as reason:
                found = {"not_applicable": str(reason)}
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(frame.filename).name}:{frame.lineno}"
                found = {"error": f"{type(error).__name__}: {error}"[:300] + f" at {place}"}
            self.record(budget, found | {"took_s": time.perf_counter() - begun})
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()

    def under(self, budget: str) -> Record:
        import rekindle

        asked: float | int = self.own_peak() if budget == "own" else float(budget)
        found: Record = {}
        managed: dict[str, Any] = {}
        with beside_others(self.args.device):
            for mode in ("off", "on"):
                managed[mode] = rekindle.rematerialize(
                    self.load.model,
                    self.load.args,
                    self.load.kwargs,
                    budget=asked,
                    hold_outputs=not self.load.loss_inside,
                    time_limit_s=self.args.plan_limit,
                    best_effort=True,
                    arena=mode == "on",
                )
                found[mode] = self.taken(managed[mode], f"{self.name}.{budget}.{mode}")
                plan = managed[mode].plan
                predicted = plan.predict()
                found[mode] |= {
                    "predicted_peak": predicted.peak_bytes,
                    "predicted_reserved": predicted.reserved_bytes,
                    "planned_peak": plan.peak_bytes,
                }
                use = plan.runner.arena
                if use is not None:
                    arena = use._arena
                    found[mode]["arena"] = {
                        "asked": sum(use.segments),
                        "size": arena.size_bytes if arena else 0,
                        "segments": arena.held_bytes() if arena else 0,
                        "num_inside": use.num_inside,
                    }
                if self.args.traces is not None:
                    plan.save(self.args.traces / f"{self.name}.{budget}.{mode}.plan.json")
        with alone(self.args.device):
            for _ in range(2):
                for mode, model in managed.items():
                    found[mode].setdefault("all_ms", []).append(round(self.ms(model), 3))
        for mode in managed:
            found[mode]["ms"] = min(found[mode]["all_ms"])
        return found

    def own_peak(self) -> int:
        """The activation peak of the model's own switch, in a model of its own."""
        if self.load.enable_own is None or not self.on_gpu:
            raise NotApplicable("the model has no switch of its own")
        with beside_others(self.args.device):
            load = MODELS[self.name](self.args.device, self.args.small)
            model, _ = prepare(load, "own", {}, 0)
            mine, self.load = self.load, load
            try:
                return int(self.taken(model, "own")["peak"])
            finally:
                self.load = mine

    def clear(self) -> None:
        for parameter in self.load.model.parameters():
            parameter.grad = None

    def ms(self, model: Any) -> float:
        found = timed(lambda: step(model, self.load), self.args.device, 5)["ms"]
        self.clear()
        return float(found)

    def taken(self, model: Any, name: str) -> Record:
        """Peak and reserved of a step, above what is resident."""
        run: Callable[[], Any] = lambda: step(model, self.load)  # noqa: E731
        for _ in range(NUM_WARM if name.endswith(("off", "on")) else 3):
            run()
        self.clear()
        gc.collect()
        if not self.on_gpu:
            return {"peak": 0, "reserved": 0}
        found = self.account(run)
        if self.args.traces is not None and name.endswith("off"):
            try:
                found |= self.trace(run, name)
            except Exception as error:
                found["trace_error"] = f"{type(error).__name__}: {error}"[:200]
        return found

    def account(self, run: Callable[[], Any]) -> Record:
        from rekindle.predict.step_measurement import _fill_gaps, _segments_in_use

        gaps = _fill_gaps(self.device)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        held = sum(s["total_size"] for s in _segments_in_use(self.device))
        torch.cuda.reset_peak_memory_stats()
        found: Record = {}
        for key in ("reserved", "reserved_later"):  # the first step, and three more
            for _ in range(1 if key == "reserved" else 3):
                run()
            self.clear()
            torch.cuda.synchronize()
            found[key] = torch.cuda.max_memory_reserved() - held
        found["peak"] = torch.cuda.max_memory_allocated() - base
        found["alive"] = sum(
            s["total_size"] for s in torch.cuda.memory_snapshot() if s["allocated_size"]
        )
        del gaps
        return found

    def trace(self, run: Callable[[], Any], name: str) -> Record:
        """The requests of a step as recorded, and what the model of the allocator makes of them."""
        from rekindle import _native
        from rekindle.predict.step_measurement import _fill_gaps, _segments_in_use

        gaps = _fill_gaps(self.device)
        torch.cuda.synchronize()
        held = sum(s["total_size"] for s in _segments_in_use(self.device))
        torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
        try:
            torch.cuda.reset_peak_memory_stats()
            run()
            self.clear()
            torch.cuda.synchronize()
            reserved = torch.cuda.max_memory_reserved() - held
            entries = torch.cuda.memory._snapshot()["device_traces"][self.device.index or 0]
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        events: list[int] = []
        number: dict[int, int] = {}
        count = 0
        for entry in entries:
            if entry["action"] == "alloc":
                count += 1
                number[entry["addr"]] = count
                events.append(entry["size"])
            elif entry["action"] == "free_completed" and entry["addr"] in number:
                events.append(-number.pop(entry["addr"]))
        del gaps
        replayed = _native.replay(_native.PoolRules(), events, [], [], 1)
        path = self.args.traces / f"{name}.trace.json.gz"
        with gzip.open(path, "wt") as file:
            json.dump({"events": events, "reserved": reserved}, file)
        arena = _native.best_arena(_native.PoolRules(), events, 10_000_000, 0)
        inside = _native.replay(_native.PoolRules(), events, [], arena, 1)
        return {
            "trace_reserved": reserved,
            "trace_replayed": replayed.peak_reserved,
            "trace_arena": inside.peak_reserved,
            "num_events": len(events),
        }


def read(path: Path) -> dict[tuple[str, str], Record]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(r["model"], r["budget"]): r for r in map(json.loads, lines)}


def line(r: Record) -> str:
    head = f"{r['model']:23} {r['budget']:5}"
    if "off" not in r:
        return f"{head} {r.get('not_applicable') or r.get('error')}"
    off, on = r["off"], r.get("on")
    text = f"{head} peak {off['peak'] / GIB:6.2f}  reserved {off['reserved'] / GIB:6.2f}"
    if on is None:
        return f"{text} GiB  {off.get('ms', 0):7.1f} ms"
    arena = on.get("arena") or {}
    text += f" -> {on['reserved'] / GIB:6.2f} GiB"
    if off["peak"]:
        # To the planned peak, as the issue has it; and what was predicted to what was measured.
        text += (
            f" (x{off['reserved'] / off['peak']:.3f} -> x{on['reserved'] / off['peak']:.3f}"
            f"; predicted {off['predicted_reserved'] / off['reserved']:.3f}"
            f" {on['predicted_reserved'] / on['reserved']:.3f})"
        )
    if "trace_reserved" in off:
        text += (
            f"  trace {off['trace_replayed'] / max(1, off['trace_reserved']):.4f}"
            f" arena x{off['trace_arena'] / max(1, off['peak']):.3f}"
        )
    text += f"  {off['ms']:7.2f} -> {on['ms']:7.2f} ms ({100 * (on['ms'] / off['ms'] - 1):+.1f} %)"
    return (
        f"{text}  arena {arena.get('asked', 0) / MIB:.0f} {arena.get('size', 0) / MIB:.0f}"
        f" {arena.get('segments', 0) / MIB:.0f} MiB, {arena.get('num_inside', 0)} steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    order = [*FIRST, *(name for name in MODELS if name not in FIRST)]
    parser.add_argument("--models", default=",".join(order))
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--records", type=Path, default=HERE / "reserved.jsonl")
    parser.add_argument("--traces", type=Path, help="a folder for plans and recorded requests")
    parser.add_argument("--plan-limit", type=float, default=3.0, help="seconds for the solver")
    parser.add_argument("--jobs", type=int, default=1, help="how many at work at once")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds for it all")
    parser.add_argument("--again", action="store_true", help="also what has a record")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--here", action="store_true", help="run in this process")
    args = parser.parse_args()
    models, budgets = args.models.split(","), args.budgets.split(",")
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    if args.here:
        for name in models:
            Case(name, args).run(budgets)
        return
    known = {} if args.again else read(args.records)
    if not args.table:
        due = {m: [b for b in budgets if "off" not in known.get((m, b), {})] for m in models}
        commands = [
            [
                sys.executable, __file__, "--here", "--models", name, "--budgets", ",".join(todo),
                "--device", args.device, "--plan-limit", str(args.plan_limit),
                "--records", str(args.records), *(["--small"] if args.small else []),
                *(["--traces", str(args.traces)] if args.traces is not None else []),
            ]
            for name, todo in due.items() if todo
        ]  # fmt: skip
        run_all(commands, args.jobs, time.monotonic() + args.deadline)
    print()
    for record in read(args.records).values():
        print(line(record))


if __name__ == "__main__":
    main()
