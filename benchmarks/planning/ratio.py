"""The first plan of each model of benchmarks/gpu, small, beside another checkout's.

    python benchmarks/planning/ratio.py --against PATH [--models M ...] [--repeats 3] [-o FILE]

The claim: planning takes no longer than with 950eb75 (`--against` names a folder that holds it,
built), but for what Dynamo needs to read the call: the median over the models of

    (first plan here - reading the call here) / (first plan there)

is at most 1. The first plan is made with an empty cache and keeps everything, so that no solver
runs, whose time is its limit. Each is made in a process of its own, by the checkouts in turn, and
the medians of the processor's time are compared. Who has no `pipeline.read` reads nothing apart.
"""

import argparse
import importlib.util
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

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "gpu"))
sys.path.append(str(HERE.parents[1] / "tests"))
SHARED_WORK = 0.02  # of a median over models: what a busy machine makes of it


def first_plan(name: str) -> dict[str, float]:
    """In this process, which has planned nothing so far."""
    from models import MODELS
    from support import torchvision_on_cpu

    import rekindle

    torchvision_on_cpu.install()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load = MODELS[name]("cpu", True)
    core: Any = importlib.import_module("rekindle.core")
    spent = [0.0]
    if importlib.util.find_spec("rekindle.pipeline") is not None:
        pipeline: Any = importlib.import_module("rekindle.pipeline")
        read = pipeline.read

        def timed(*given: Any) -> Any:
            begun = time.process_time()
            try:
                return read(*given)
            finally:
                spent[0] += time.process_time() - begun

        pipeline.read = timed
    begun = time.process_time()
    rekindle.plan(load.model, load.args, load.kwargs, schedule=core.keep_all)
    return {"cpu_s": round(time.process_time() - begun, 3), "reading_cpu_s": round(spent[0], 3)}


def elsewhere(name: str, checkout: Path) -> dict[str, float]:
    """This script in a process of its own, with a checkout's product and an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout / "src"),
            "REKINDLE_CACHE_DIR": folder,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--only", name]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    from models import MODELS

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout, built")
    parser.add_argument("--models", nargs="*", default=[m for m in MODELS if "1x16384" not in m])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "ratio.json")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(first_plan(args.only)))
        return 0
    if args.against is None:
        parser.error("--against is missing: a folder that holds another checkout, built")
    checkouts = {"here": HERE.parents[1], "against": args.against}
    rows: dict[str, Any] = {}
    for name in args.models:
        found: dict[str, list[dict[str, float]]] = {which: [] for which in checkouts}
        for _ in range(args.repeats):
            for which, checkout in checkouts.items():
                found[which].append(elsewhere(name, checkout))
        middle = {
            which: {key: statistics.median(r[key] for r in runs) for key in runs[0]}
            for which, runs in found.items()
        }
        here, there = middle["here"], middle["against"]["cpu_s"]
        rows[name] = middle | {
            "ratio": round(here["cpu_s"] / there, 3),
            "ratio_without_reading": round((here["cpu_s"] - here["reading_cpu_s"]) / there, 3),
        }
        print(name, json.dumps(rows[name]), flush=True)
    ratio, without = (
        round(statistics.median(r[key] for r in rows.values()), 3)
        for key in ("ratio", "ratio_without_reading")
    )
    commit = subprocess.run(
        ["git", "-C", str(args.against), "rev-parse", "--short", "HEAD"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    record = {
        "torch": torch.__version__,
        "device": "cpu",
        "against": commit.stdout.strip(),
        "median_ratio": ratio,
        "median_ratio_without_reading": without,
        "models": rows,
    }
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"median: {ratio} with reading the call, {without} without")
    return 0 if without <= 1 + SHARED_WORK else 1


if __name__ == "__main__":
    sys.exit(main())
