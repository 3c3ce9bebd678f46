"""Step time against activation memory, every method, on one machine in one run.

    python benchmarks/gpu/compare.py                       # every missing or stale case
    python benchmarks/gpu/compare.py --models unet,vit-large --methods eager,rekindle@0.5
    python benchmarks/gpu/compare.py --table               # print what is stored
    python benchmarks/gpu/compare.py --jobs 3              # plan one case beside steps of another
    python benchmarks/gpu/compare.py --device cpu --small --results /tmp/try   # try the script

One process per case (`--together`: per model, which builds and profiles it once). A case is stored
as results/MODEL.METHOD.json and is stale when what it depends on has changed: `methods.py`,
`models.py`, torch, the device, for Rekindle's its code.
Activation peak is max_memory_allocated above what was allocated before the step, with gradients
None. Time is the median of CUDA events between steps that follow each other; Rekindle's cases time
eager once more, in the same minute, and are compared with that.

Methods: eager; own (the model's own block switch); blocks (torch.utils.checkpoint around each
block); sac (selective: matmuls and attention saved); inductor@B (torch.compile at
activation_memory_budget B); rekindle@B with B a fraction of eager's activation peak, or
rekindle@own / rekindle@blocks for the activation peak of that method; graph@B the same with
cuda_graph=True, whose peak is the memory reserved for the recorded step and what a replay adds to
it. With `--jobs N`, N are at work at once, each on its own share of the cores; what is measured on
the device, profiling included, is measured while nobody else uses it.
torch.compile takes minutes, for which nobody could measure: all that is due is compiled first, each
case in its own process, and found in Inductor's caches when its turn comes; one that is not
compiled in `--compile-limit` seconds is noted as such. `--deadline S`: after S seconds nothing is
begun, and what still runs is ended; the same command goes on another time.
"""

import argparse
import contextlib
import functools
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from methods import NotApplicable, beside_others, built, prepare, run_case, step  # noqa: E402
from models import MODELS  # noqa: E402
from stamps import is_stale, stamp  # noqa: E402

METHODS = (
    "eager", "own", "blocks", "sac", "inductor@1.0", "inductor@0.5", "inductor@0.25",
    "rekindle@1.0", "rekindle@0.7", "rekindle@0.5", "rekindle@0.3", "rekindle@own",
    "rekindle@blocks", "graph@1.0", "graph@0.5", "graph@own",
)  # fmt: skip
MATCHED = ("eager", "own", "blocks")  # those whose peaks are budgets of Rekindle's cases
GIB = 2**30


def stamp_of(method: str, args: argparse.Namespace) -> str:
    ours = method.startswith(("rekindle@", "graph@"))
    return stamp(("models.py", "methods.py"), args.device, args.small, ours)


def stored(name: str, method: str, args: argparse.Namespace) -> Path:
    return Path(args.results / f"{name}.{method}.json")


def store(record: dict[str, Any], args: argparse.Namespace) -> None:
    name, method = record["model"], record["method"]
    record = {"model": name, "method": method, "stamp": stamp_of(method, args)} | record
    stored(name, method, args).write_text(json.dumps(record, indent=1) + "\n")
    print(line(record), flush=True)


def compile_only(name: str, method: str, args: argparse.Namespace) -> None:
    """Leaves what torch.compile makes of a step in Inductor's caches."""
    begun = time.perf_counter()
    try:
        load = built(name, args)
        with beside_others(args.device):
            model, _ = prepare(load, method, {}, args.plan_limit)
            step(model, load)
        said = f"compiled in {time.perf_counter() - begun:.0f} s"
    except Exception as error:  # it comes again, and is stored, when the case is measured
        said = f"not compiled: {type(error).__name__}"
    print(f"{name:24} {method:16} {said}", flush=True)


def run_model(name: str, methods: list[str], args: argparse.Namespace) -> None:
    profiled: dict[str, float] = {}
    load = None
    for method in methods:
        known = {
            p: json.loads(f.read_text()) for p in MATCHED if (f := stored(name, p, args)).exists()
        } | {"profiled": profiled}
        record: dict[str, Any] = {"model": name, "method": method}
        try:
            load = load or built(name, args)
            record |= run_case(load, method, args, known)
        except NotApplicable as reason:
            record["not_applicable"] = str(reason)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"[:500]
        store(record, args)
        if method in ("own", "blocks", "sac"):  # they changed it
            load = None
        torch._dynamo.reset()
        gc.collect()
        if args.device.startswith("cuda"):
            torch.cuda.empty_cache()


def line(record: dict[str, Any]) -> str:
    head = f"{record['model']:24} {record['method']:16}"
    if "ms" not in record:
        return f"{head} {record.get('not_applicable') or record.get('error')}"
    text = f"{head} {record['ms']:9.1f} ms {record.get('peak_bytes', 0) / GIB:7.2f} GiB"
    if "plan_s" in record:
        text += (
            f" ({100 * (record['ms'] / record['eager_ms'] - 1):+5.1f} %)"
            f"  predicted {record['predicted_ms']:8.1f} ms "
            f"{record['predicted_peak_bytes'] / GIB:6.2f} GiB  plan {record['plan_s']:5.1f} s"
            f"  grad {record['gradient_error']:.1e} (eager {record['eager_to_itself']:.1e})"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--plan-limit", type=float, default=20.0, help="seconds for the solver")
    parser.add_argument("--compile-limit", type=float, default=600.0, help="seconds for Inductor")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds for it all")
    parser.add_argument("--jobs", type=int, default=1, help="how many at work at once")
    parser.add_argument("--together", action="store_true", help="one process per model")
    parser.add_argument("--here", action="store_true", help="run in this process")
    parser.add_argument("--compile", action="store_true", help="compile in this process")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    models, methods = args.models.split(","), args.methods.split(",")
    for name in models:
        if name not in MODELS:
            parser.error(f"there is no model {name!r}; the models are {', '.join(MODELS)}")
    for method in methods:
        if method.partition("@")[0] not in {m.partition("@")[0] for m in METHODS}:
            parser.error(f"there is no method {method!r}; the methods are {', '.join(METHODS)}")
    if args.table:
        for path in sorted(args.results.glob("*.json")):
            print(line(json.loads(path.read_text())))
    elif args.compile:
        for name, method in itertools.product(models, methods):
            compile_only(name, method, args)
    elif args.here:
        for name in models:
            run_model(name, methods, args)
    else:
        run_due(models, methods, args)


def run_due(models: list[str], methods: list[str], args: argparse.Namespace) -> None:
    """What is missing or stale: first all that is to be compiled, then everything measured."""
    stop = time.monotonic() + args.deadline
    due = {
        name: [m for m in methods if is_stale(stored(name, m, args), stamp_of(m, args))]
        for name in models
    }

    def command(kind: str, name: str, asked: list[str]) -> list[str]:
        return [
            sys.executable, __file__, kind, "--models", name, "--methods", ",".join(asked),
            "--device", args.device, "--repeats", str(args.repeats),
            "--plan-limit", str(args.plan_limit), "--results", str(args.results),
            *(["--small"] if args.small else []),
        ]  # fmt: skip

    compiled = [(n, m) for n, todo in due.items() for m in todo if m.startswith("inductor@")]
    ended = run_all(
        [command("--compile", n, [m]) for n, m in compiled], args.jobs, stop, args.compile_limit
    )
    for (name, method), in_time in zip(compiled, ended, strict=True):
        if not in_time:
            due[name].remove(method)
            if in_time is False and time.monotonic() < stop:
                reason = f"not compiled in {args.compile_limit:g} s"
                store({"model": name, "method": method, "not_applicable": reason}, args)
    if args.together:
        waves = [[(name, todo) for name, todo in due.items() if todo]]
    else:  # what budgets are taken from comes first
        cases = [(name, [m]) for name, todo in due.items() for m in todo]
        waves = [
            [c for c in cases if c[1][0] in MATCHED],
            [c for c in cases if c[1][0] not in MATCHED],
        ]
    for wave in waves:
        run_all([command("--here", name, part) for name, part in wave], args.jobs, stop)


def run_all(
    commands: list[list[str]], num_jobs: int, stop: float, limit_s: float = float("inf")
) -> list[bool | None]:
    """Each in its own process, `num_jobs` at a time, each of these on cores of its own. For each
    whether it ended by itself; None where it was not begun before `stop`."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[k::num_jobs]) or set(cores) for k in range(num_jobs)]
    ended: list[bool | None] = [None] * len(commands)
    running: dict[int, tuple[int, float, subprocess.Popen[bytes]]] = {}
    next_up = 0
    try:
        while running or (next_up < len(commands) and time.monotonic() < stop):
            now = time.monotonic()
            for k, share in enumerate(shares):
                if k in running:
                    which, begun, process = running[k]
                    if process.poll() is not None or now > min(stop, begun + limit_s):
                        ended[which] = process.poll() is not None
                        end(process)
                        del running[k]
                if k not in running and next_up < len(commands) and now < stop:
                    process = subprocess.Popen(
                        commands[next_up],
                        start_new_session=True,  # so that what it has started ends with it
                        preexec_fn=functools.partial(os.sched_setaffinity, 0, share),
                    )
                    running[k] = (next_up, now, process)
                    next_up += 1
            time.sleep(0.05)
    finally:  # also when it is interrupted: they have sessions of their own
        for _, _, process in running.values():
            end(process)
    return ended


def end(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
