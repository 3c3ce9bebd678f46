"""The first plan of a deep model: of what its time is made up, the solver's apart.

    python benchmarks/planning/first.py [MODEL ...] [--limit 6] [-o FILE]

The claims: no stage of a plan takes 5 s of a processor's time for a net of 1001 layers or the other
deep models, and the solver, however often it has to try, takes less than twice its limit. The
models have their full depth and little width: what planning costs hangs on how many ops there are.
Chains of elementwise ops are joined and batch norm is taken apart as on a GPU (the separate ops
stand in for the kernels). Each model is planned in a process of its own, with an empty cache, then
called for the first time. Stages are the processor's time; `solver` is also given by the clock,
since its limit is one, once for each time that it was called. `first-before.json` has the same with
the code of 966d108.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import again
import torch
from gpt2 import gpt2
from torch import nn

import rekindle

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

BUDGET = 0.6
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], torch.Tensor]]


def resnet1001() -> Call:
    from models import PreActBlock

    blocks = [PreActBlock(16) for _ in range(500)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000),
    )  # fmt: skip
    targets = torch.zeros(16, dtype=torch.int64)
    images = torch.randn(16, 3, 8, 8)
    return model, (images,), {}, lambda out: nn.functional.cross_entropy(out, targets)


def transformer_36_36() -> Call:
    model = nn.Transformer(32, 2, 36, 36, dim_feedforward=128, batch_first=True)
    pair = (torch.randn(2, 16, 32), torch.randn(2, 16, 32))
    return model, pair, {}, lambda out: out.square().mean()


def gpt2_96() -> Call:
    model, kwargs = gpt2(96)
    return model, (), kwargs, lambda out: out.loss


def t5_base() -> Call:
    gpt2(1)  # transformers, with what it needs on a CPU
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=12, num_heads=4, vocab_size=256,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, 256, (8, 64))
    model = T5ForConditionalGeneration(config)
    return model, (), {"input_ids": ids, "labels": ids}, lambda out: out.loss


MODELS = {
    "resnet1001": resnet1001,
    "transformer-36-36": transformer_36_36,
    "gpt2-96-layers": gpt2_96,
    "t5-base": t5_base,
}


def as_on_a_gpu() -> None:
    graph_edit: Any = importlib.import_module("rekindle.rewrite.graph_edit")
    graph_edit.MIN_NUMEL, graph_edit.ANYWHERE = 64, True


def measure(name: str, limit_s: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    as_on_a_gpu()
    model, args, kwargs, loss = MODELS[name]()
    room: Any = importlib.import_module("rekindle.solving")
    solve, walls = room.run_constrained, []

    def by_the_clock(*given: Any, **more: Any) -> Any:
        begun = time.perf_counter()
        try:
            return solve(*given, **more)
        finally:
            walls.append(time.perf_counter() - begun)

    room.run_constrained = by_the_clock
    spent: dict[str, float] = {}
    wall = time.perf_counter()
    with again.stages(spent, again.STAGES | {(room, "run_constrained"): "solver"}):
        managed = rekindle.rematerialize(
            model.train(), args, kwargs, budget=BUDGET, time_limit_s=limit_s
        )
    wall = time.perf_counter() - wall
    spent["choose"] -= spent["solver"]
    plan: Any = managed.plan
    begun = time.process_time()
    _ = plan.runner
    spent["lowering"] = time.process_time() - begun
    begun = time.process_time()
    loss(managed(*args, **kwargs)).backward()
    spent["first_step"] = time.process_time() - begun
    return {
        "model": name,
        "num_ops": len(plan.problem.ops),
        "overhead": round(plan.overhead, 4),
        "plan_wall_s": round(wall, 2),
        "solver_wall_s": [round(s, 2) for s in walls],
        "stages_cpu_s": {stage: round(s, 2) for stage, s in spent.items()},
        "cpu_s_outside_solver": round(sum(spent.values()) - spent["solver"], 2),
    }


def alone(name: str, limit_s: float) -> dict[str, Any]:
    """In a process of its own, with a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REKINDLE_CACHE_DIR"] = folder
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(measure, (name, limit_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--limit", type=float, default=6.0, help="seconds, for the solver")
    parser.add_argument("-o", "--output", default=str(Path(__file__).with_name("first.json")))
    args = parser.parse_args()
    rows = []
    for name in args.models:
        rows.append(alone(name, args.limit))
        print(json.dumps(rows[-1]), flush=True)
    record = {"torch": torch.__version__, "device": "cpu", "limit_s": args.limit, "rows": rows}
    Path(args.output).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
