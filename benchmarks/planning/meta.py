"""A plan for a model that fits nowhere, made where its device is absent.

    python benchmarks/planning/meta.py [--layers 24] [--batch 10] [-o FILE]

The claim: a training step of GPT-2 medium whose peak is 77 GiB when it keeps everything plans in
5 s within 500 MiB of memory, torch and transformers included. Parameters and batch are on meta, the
device is a description; no solver runs. `rss_mib` is that of the process before and after, `most`
what it ever was.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpt2 import gpt2

import rekindle
from rekindle.core import keep_all


def measure(num_layers: int, batch: int, device: str) -> dict[str, Any]:
    gpt2(1)  # transformers, with what it needs on a CPU
    import transformers

    config = transformers.GPT2Config(n_layer=num_layers, n_embd=1024, n_head=16, use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
        ids = torch.zeros(batch, 1024, dtype=torch.int64)
    before = rss_mib()
    wall, cpu = time.perf_counter(), time.process_time()
    call = {"input_ids": ids, "labels": ids}
    plan = rekindle.plan(model, kwargs=call, schedule=keep_all, device_profile=device)
    return {
        "layers": num_layers,
        "batch": batch,
        "peak_gib": round(plan.keep_all_peak_bytes / 2**30, 1),
        "wall_s": round(time.perf_counter() - wall, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "rss_mib": [before, rss_mib()],
        "most_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def rss_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() // 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--device-profile", default="h200")
    parser.add_argument("-o", "--output", default=str(Path(__file__).with_name("meta.json")))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REKINDLE_CACHE_DIR"] = folder
        found = measure(args.layers, args.batch, args.device_profile)
    print(json.dumps(found))
    record = {"torch": torch.__version__, "device": args.device_profile, **found}
    Path(args.output).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
