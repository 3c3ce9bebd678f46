"""Step time against activation memory, every method, on one machine in one run.

    python benchmarks/gpu/compare.py                       # every missing or stale case
    python benchmarks/gpu/compare.py --models unet,vit-large --methods eager,rekindle@0.5
    python benchmarks/gpu/compare.py --table               # print what is stored
    python benchmarks/gpu/compare.py --jobs 3              # plan one model beside steps of another
    python benchmarks/gpu/compare.py --device cpu --small --results /tmp/try   # try the script

One process per model (`--isolate`: per case). A case is stored as results/MODEL.METHOD.json and is
stale when what it depends on has changed: script, models, torch, device, for Rekindle's its code.
Activation peak is max_memory_allocated above what was allocated before the step, with gradients
None. Time is the median of CUDA events between steps that follow each other; Rekindle's cases time
eager once more, in the same minute, and are compared with that.

Methods: eager; own (the model's own block switch); blocks (torch.utils.checkpoint around each
block); sac (selective: matmuls and attention saved); inductor@B (torch.compile at
activation_memory_budget B); rekindle@B with B a fraction of eager's activation peak, or
rekindle@own / rekindle@blocks for the activation peak of that method; graph@B the same with
cuda_graph=True, whose peak is the memory reserved for the recorded step and what a replay adds to
it. With `--jobs N`, N models are at work at once, each on its own share of the
cores; what is measured on the device, profiling included, is measured while nobody else uses it.
"""

import argparse
import contextlib
import copy
import fcntl
import functools
import gc
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from models import MODELS, Workload  # noqa: E402

METHODS = (
    "eager", "own", "blocks", "sac", "inductor@1.0", "inductor@0.5", "inductor@0.25",
    "rekindle@1.0", "rekindle@0.7", "rekindle@0.5", "rekindle@0.3", "rekindle@own",
    "rekindle@blocks", "graph@1.0", "graph@0.5", "graph@own",
)  # fmt: skip
NUM_AGAIN = 3  # runs of eager that are compared with another
GIB = 2**30


@contextlib.contextmanager
def alone(device: str) -> Iterator[None]:
    """Nothing else of this comparison runs on the device meanwhile."""
    with _locked(device, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def beside_others(device: str) -> Iterator[None]:
    """The device may be used: nobody measures meanwhile."""
    with _locked(device, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _locked(device: str, kind: int) -> Iterator[None]:
    folder = Path(tempfile.gettempdir())
    with (
        (folder / "rekindle-device.door").open("w") as door,
        (folder / "rekindle-device.lock").open("w") as lock,
    ):
        fcntl.flock(door, fcntl.LOCK_EX)  # who waits to be alone lets no others in
        fcntl.flock(lock, kind)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
        if device.startswith("cuda"):
            torch.cuda.synchronize()


class NotApplicable(Exception):
    """The method does not exist for this model."""


def wrap_blocks(load: Workload, selective: bool) -> None:
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    if load.blocks is None:
        raise NotApplicable("the model has no list of blocks")
    aten = torch.ops.aten
    heavy = {
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }  # fmt: skip

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in heavy else CheckpointPolicy.PREFER_RECOMPUTE

    more = {}
    if selective:
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in load.blocks(load.model):
        inner = block.forward
        block.forward = functools.partial(checkpoint, inner, use_reentrant=False, **more)


def prepare(
    load: Workload, method: str, known: dict[str, Any], limit_s: float
) -> tuple[Any, dict[str, Any]]:
    """The model as the method wants it, and what to note about it."""
    name, _, setting = method.partition("@")
    match name:
        case "eager":
            return load.model, {}
        case "own":
            if load.enable_own is None:
                raise NotApplicable("the model has no switch of its own")
            load.enable_own(load.model)
            return load.model, {}
        case "blocks" | "sac":
            wrap_blocks(load, selective=name == "sac")
            return load.model, {}
        case "inductor":
            from torch._functorch import config

            config.activation_memory_budget = float(setting)
            return torch.compile(load.model), {}
        case "rekindle" | "graph":
            return prepare_rekindle(load, setting, known, limit_s, cuda_graph=name == "graph")
    raise SystemExit(f"there is no method {method!r}; the methods are {', '.join(METHODS)}")


def prepare_rekindle(
    load: Workload, setting: str, known: dict[str, Any], limit_s: float, cuda_graph: bool
) -> tuple[Any, dict[str, Any]]:
    import rekindle

    peer, share = (setting, 1.0) if setting in ("own", "blocks") else ("eager", float(setting))
    budget: float | int
    if "peak_bytes" in known.get(peer, {}):
        budget = int(share * known[peer]["peak_bytes"])
    elif peer == "eager" and next(load.model.parameters()).device.type == "cpu":
        budget = share  # of the keep-all peak: a CPU's allocator keeps no count
    else:
        raise NotApplicable(f"there is no result of {peer!r} to match")
    say = {"profile": "measure", "hold_outputs": not load.loss_inside, "cuda_graph": cuda_graph}
    call = {"args": load.args, "kwargs": load.kwargs}
    profile_s = 0.0
    device = str(next(load.model.parameters()).device)
    if not known["profiled"]:  # the measured ops are kept on disk: planning measures none then
        with alone(device):
            start = time.perf_counter()
            rekindle.rematerialize(load.model, **call, budget=1.0, solver="keep-all", **say)
            profile_s = time.perf_counter() - start
            known["profiled"]["s"] = profile_s
    with beside_others(device):
        start = time.perf_counter()
        managed = rekindle.rematerialize(
            load.model, **call, budget=budget, time_limit_s=limit_s, **say
        )
        plan_s = time.perf_counter() - start + profile_s
    plan = managed.plan
    return managed, {
        "plan_s": plan_s,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "predicted_overhead": plan.overhead,
        "predicted_ms": plan.predict().step_ns / 1e6,
    }


def step(model: Any, load: Workload) -> torch.Tensor:
    for parameter in load.model.parameters():
        parameter.grad = None
    loss = load.loss(model(*load.args, **load.kwargs))
    loss.backward()
    return loss.detach()


def gradients(load: Workload) -> list[torch.Tensor]:
    return [p.grad.detach().clone() for p in load.model.parameters() if p.grad is not None]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Relative difference of two sets of gradients, over all of them together."""
    top = sum(float((x - y).abs().double().square().sum()) for x, y in zip(a, b, strict=True))
    bottom = sum(float(x.abs().double().square().sum()) for x in a)
    return (top / bottom) ** 0.5 if bottom else 0.0


def _reserved(load: Workload) -> int:
    for parameter in load.model.parameters():
        parameter.grad = None
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def measure(
    run: Callable[[], Any], load: Workload, device: str, repeats: int, reserved: int | None
) -> dict[str, Any]:
    """`reserved`: for a recorded step, what was reserved before it was recorded."""
    cuda = device.startswith("cuda")
    for _ in range(3):
        run()
    for parameter in load.model.parameters():
        parameter.grad = None
    gc.collect()
    result: dict[str, Any] = {}
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        result["peak_bytes"] = torch.cuda.max_memory_allocated() - base
        result["reserved_bytes"] = torch.cuda.max_memory_reserved()
        if reserved is not None:
            result["peak_bytes"] += _reserved(load) - reserved
    return result | timed(run, device, repeats)


def timed(run: Callable[[], Any], device: str, repeats: int) -> dict[str, Any]:
    """Steps that follow each other as in training: the host does not wait at the end of each."""
    times = []
    if device.startswith("cuda"):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        for mark in marks:  # the first step only fills the queue
            run()
            mark.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    else:
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(times), "ms_all": [round(t, 3) for t in times]}


def built(name: str, args: argparse.Namespace) -> Workload:
    torch.manual_seed(0)
    with beside_others(args.device):
        return MODELS[name](args.device, args.small)


def run_case(
    load: Workload, method: str, args: argparse.Namespace, known: dict[str, Any]
) -> dict[str, Any]:
    state = copy.deepcopy(load.model.state_dict())

    def seeded(model: Any) -> list[torch.Tensor]:
        load.model.load_state_dict(state)
        torch.manual_seed(1)
        step(model, load)
        return gradients(load)

    result: dict[str, Any] = {}
    ours = method.startswith(("rekindle", "graph"))
    graph = method.startswith("graph")
    reserved = _reserved(load) if graph and args.device.startswith("cuda") else None
    start = time.perf_counter()
    model, notes = prepare(load, method, known, args.plan_limit)
    result |= notes
    if method.startswith("inductor"):
        with beside_others(args.device):
            step(model, load)  # compiles on the host
            torch.cuda.empty_cache()
    with alone(args.device):
        if ours or method == "eager":
            plain = seeded(load.model)
            result["eager_to_itself"] = max(
                distance(plain, seeded(load.model)) for _ in range(NUM_AGAIN)
            )
        if ours:
            for _ in range(2 if graph else 0):  # it runs, is recorded, and then replayed
                seeded(model)
            result["gradient_error"] = distance(plain, seeded(model))
        plain = []
        step(model, load)
        result["first_step_s"] = time.perf_counter() - start
        result |= measure(lambda: step(model, load), load, args.device, args.repeats, reserved)
        if ours:
            beside = timed(lambda: step(load.model, load), args.device, args.repeats)
            result["eager_ms"] = beside["ms"]
    return result


@functools.cache
def fingerprint(device: str, small: bool, ours: bool) -> str:
    """Of all that a result depends on; of Rekindle's own code where it is `ours`."""
    parts = [torch.__version__, device, str(small)]
    if device.startswith("cuda"):
        parts.append(torch.cuda.get_device_name())
    files = [HERE / "models.py", HERE / "compare.py"]
    if ours:
        root = HERE.parent.parent
        files += sorted((root / "src").rglob("*.py"))
        files += sorted(f for f in (root / "cpp").iterdir() if f.suffix in (".cpp", ".h"))
    parts += [file.read_text() for file in files]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def stamp_of(method: str, args: argparse.Namespace) -> str:
    ours = method.startswith(("rekindle@", "graph@"))
    return fingerprint(args.device, args.small, ours)


def run_model(name: str, methods: list[str], args: argparse.Namespace) -> None:
    profiled: dict[str, float] = {}
    load = None
    for method in methods:
        path = args.results / f"{name}.{method}.json"
        known = {
            p: json.loads(f.read_text())
            for p in ("eager", "own", "blocks")
            if (f := args.results / f"{name}.{p}.json").exists()
        } | {"profiled": profiled}
        record: dict[str, Any] = {"model": name, "method": method}
        record["stamp"] = stamp_of(method, args)
        try:
            load = load or built(name, args)
            record |= run_case(load, method, args, known)
        except NotApplicable as reason:
            record["not_applicable"] = str(reason)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"[:500]
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(line(record), flush=True)
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


def stale(path: Path, stamp: str) -> bool:
    if not path.exists():
        return True
    record = json.loads(path.read_text())
    return record.get("stamp") != stamp or "error" in record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--plan-limit", type=float, default=20.0, help="seconds for the solver")
    parser.add_argument("--jobs", type=int, default=1, help="models at work at once")
    parser.add_argument("--isolate", action="store_true", help="one process per case")
    parser.add_argument("--here", action="store_true", help="run in this process")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.results.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    models, methods = args.models.split(","), args.methods.split(",")
    if args.table:
        for path in sorted(args.results.glob("*.json")):
            print(line(json.loads(path.read_text())))
        return
    if args.here:
        for name in models:
            run_model(name, methods, args)
        return
    head = [
        sys.executable, __file__, "--here", "--device", args.device,
        "--repeats", str(args.repeats), "--plan-limit", str(args.plan_limit),
        "--results", str(args.results), *(["--small"] if args.small else []),
    ]  # fmt: skip
    groups = []
    for name in models:
        todo = [m for m in methods if stale(args.results / f"{name}.{m}.json", stamp_of(m, args))]
        groups += [(name, [m]) for m in todo] if args.isolate else [(name, todo)] if todo else []
    run_all([[*head, "--models", n, "--methods", ",".join(g)] for n, g in groups], args.jobs)


def run_all(commands: list[list[str]], num_jobs: int) -> None:
    """Each in its own process, `num_jobs` at a time, each of these on cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[k::num_jobs]) or set(cores) for k in range(num_jobs)]
    running: dict[int, subprocess.Popen[bytes]] = {}
    while commands or running:
        for k in range(num_jobs):
            if k in running and running[k].poll() is not None:
                del running[k]
            if k not in running and commands:
                share = shares[k]
                running[k] = subprocess.Popen(
                    commands.pop(0), preexec_fn=functools.partial(os.sched_setaffinity, 0, share)
                )
        time.sleep(0.05)


if __name__ == "__main__":
    main()
