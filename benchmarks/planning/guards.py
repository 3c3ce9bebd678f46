"""What the checks of a managed call cost per step, and the first plan beside another checkout's.

    python benchmarks/planning/guards.py [--layers 24] [--calls 200] [--against PATH] [-o FILE]

The claims: for GPT-2 with 24 layers, finding out whether a plan covers a call takes at most 0.3 ms;
the first plan from nothing takes at most 1.5 times as long as with another checkout (950eb75, where
`--against` names a folder that holds it, built).

`guards_ms` is the evaluation of the guards; `around_ms` is all of a managed call that is not the
plan's own forward: the call's time less that of the runner in it. The median and the least over the
calls are given, with eager's time of the same call. The first plan is made with an empty cache and
keeps everything, so that no solver runs; each is made in a process of its own, by the checkouts in
turn, and the ratio is that of the medians of the processor's time. `solved` is a plan at 0.6 with
the solver, whose limit is 5 s.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpt2 import gpt2

import rekindle

BUDGET = 0.6


def first_plan(num_layers: int) -> dict[str, float]:
    """In this process, which has planned nothing so far."""
    model, kwargs = gpt2(num_layers)
    room: Any = importlib.import_module("rekindle.core")
    wall, cpu = time.perf_counter(), time.process_time()
    rekindle.plan(model, kwargs=kwargs, schedule=room.keep_all)
    return {
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


def solved_plan(num_layers: int) -> dict[str, float]:
    model, kwargs = gpt2(num_layers)
    wall, cpu = time.perf_counter(), time.process_time()
    rekindle.plan(model, kwargs=kwargs, budget=BUDGET, time_limit_s=5.0)
    return {
        "wall_s": round(time.perf_counter() - wall, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


def checks(num_layers: int, num_calls: int) -> dict[str, Any]:
    """Of a call in training, whose backward runs between the calls."""
    model, kwargs = gpt2(num_layers)
    core: Any = importlib.import_module("rekindle.core")
    runners: Any = importlib.import_module("rekindle.runtime.runner")
    managed = rekindle.rematerialize(model, kwargs=kwargs, schedule=core.keep_all, on_miss="raise")
    spans: dict[str, list[float]] = {"runner": [], "guards": []}
    owners = [(runners.Runner, "__call__", "runner")]
    guards = getattr(importlib.import_module("rekindle.torch_compat.dynamo"), "CallGuards", None)
    if guards is not None:  # not where a plan is matched by hand
        owners.append((guards, "check", "guards"))
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in owners]
    for owner, name, span in owners:
        setattr(owner, name, _timed(vars(owner)[name], spans[span]))

    def seconds(call: Any) -> float:
        started = time.perf_counter()
        loss = call(**kwargs).loss
        spent = time.perf_counter() - started
        loss.backward()
        return spent

    try:
        for _ in range(5):
            seconds(managed)
        for span in spans.values():
            span.clear()
        spent, eager = [], []
        for _ in range(num_calls):
            spent.append(seconds(managed))
            eager.append(seconds(model))
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)
    inside = spans["runner"]
    assert len(inside) == num_calls, "a managed call did not run its plan once"
    around = [1e3 * (whole - part) for whole, part in zip(spent, inside, strict=True)]
    return {
        "num_calls": num_calls,
        "around_ms": _middle(around),
        "guards_ms": _middle([1e3 * s for s in spans["guards"]]),
        "managed_forward_ms": _ms(1e3 * statistics.median(spent)),
        "eager_forward_ms": _ms(1e3 * statistics.median(eager)),
    }


def _timed(function: Any, into: list[float]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            into.append(time.perf_counter() - started)

    return call


def _middle(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": _ms(statistics.median(values)), "least": _ms(min(values))}


def _ms(value: float) -> float:
    return round(value, 3)


def elsewhere(what: str, num_layers: int, num_calls: int, checkout: Path) -> dict[str, Any]:
    """This script in a process of its own, with a checkout's product and an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout / "src"),
            "REKINDLE_CACHE_DIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--part", what]
        command += ["--layers", str(num_layers), "--calls", str(num_calls)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout, built")
    parser.add_argument("--part", choices=["first", "solved", "checks"], help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", default=str(Path(__file__).with_name("guards.json")))
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part is not None:
        parts = {
            "first": lambda: first_plan(args.layers),
            "solved": lambda: solved_plan(args.layers),
            "checks": lambda: checks(args.layers, args.calls),
        }
        print(json.dumps(parts[args.part]()))
        return
    here = Path(__file__).parents[2]
    record: dict[str, Any] = {"torch": torch.__version__, "device": "cpu", "layers": args.layers}
    record["checks"] = elsewhere("checks", args.layers, args.calls, here)
    print(json.dumps(record["checks"]), flush=True)
    checkouts = {"here": here} | ({"against": args.against} if args.against else {})
    rows: dict[str, dict[str, list[Any]]] = {
        name: {"first": [], "solved": []} for name in checkouts
    }
    for _ in range(args.repeats):
        for what in ("first", "solved"):
            for name, checkout in checkouts.items():
                rows[name][what].append(elsewhere(what, args.layers, args.calls, checkout))
    record["plans"] = rows
    if args.against:
        record["against"] = _commit(args.against)
        record["ratio"] = {
            f"{what}_{clock}": round(
                statistics.median(r[clock] for r in rows["here"][what])
                / statistics.median(r[clock] for r in rows["against"][what]),
                2,
            )
            for what in ("first", "solved")
            for clock in ("cpu_s", "wall_s")
        }
        print(json.dumps(record["ratio"]))
    Path(args.output).write_text(json.dumps(record, indent=1) + "\n")


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
