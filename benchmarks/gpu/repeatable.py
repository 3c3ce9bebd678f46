"""Whether attention, and a step of a deep model with it, gives the same bits twice.

    python benchmarks/gpu/repeatable.py --runs 3000       # cuDNN's attention alone
    python benchmarks/gpu/repeatable.py --steps 60        # steps of GPT-2 with 96 layers
    python benchmarks/gpu/repeatable.py --steps 60 --deterministic

The op runs on the same inputs again and again; other blocks are allocated in between, so that
outputs and workspaces lie elsewhere. The steps are eager's, those with everything kept and those at
the memory of the model's own switch, each compared with eager's first: with the kernels that torch
chooses by itself, among them attention that does not repeat itself, or with those that it calls
deterministic. What differs with the first and not with the second differs by the kernels, not by
the plan. Results are added to `repeatable.jsonl`.
"""

import argparse
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from methods import beside_others, distance, gradients, step
from models import MODELS

HERE = Path(__file__).resolve().parent
aten = torch.ops.aten
SHAPE = (4, 16, 512, 64)  # batch, heads, length and size of a head: those of GPT-2 with 96 layers
MODEL = "gpt2-96-layers"


# --- the op -------------------------------------------------------------------------------------


def differing(run: Callable[[], tuple[Any, ...]], num_runs: int) -> int:
    """How many runs give other bits than the first."""
    first = run()
    count = 0
    between = []
    for i in range(num_runs):
        if i % 50 == 0:
            between.append(torch.empty(i * 7919 % 900_000 + 1, device="cuda"))
        count += not all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    return count


def op_alone(num_runs: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    batch, heads, length, size = SHAPE
    q, k, v, grad = (
        torch.randn(batch, length, heads, size, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for _ in range(4)
    )

    def forward() -> tuple[Any, ...]:
        torch.manual_seed(3)
        return aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, 0.1, True, False
        )

    out, sums, cum_q, cum_k, max_q, max_k, seed, offset, *_ = forward()

    def backward() -> tuple[Any, ...]:
        return aten._scaled_dot_product_cudnn_attention_backward.default(
            grad, q, k, v, out, sums, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.1, True
        )

    for name, run in (("forward", lambda: forward()[:2]), ("backward", backward)):
        count = differing(run, num_runs)
        yield {"what": f"cuDNN attention, {name}", "runs": num_runs, "differ": count}


# --- steps --------------------------------------------------------------------------------------


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import rekindle

    if args.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products ask for it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it would hide what is read
    torch.manual_seed(0)
    load = MODELS[MODEL](args.device, args.small)
    own = json.loads((HERE / "results" / f"{MODEL}.own.json").read_text())
    budgets = {"everything kept": 1.0, "switch's memory": 0.6 if args.small else own["peak_bytes"]}
    say: dict[str, Any] = {"args": load.args, "kwargs": load.kwargs, "profile": "measure"}
    say |= {"hold_outputs": not load.loss_inside, "time_limit_s": args.plan_limit}

    def run(model: Any) -> list[torch.Tensor]:
        with beside_others(args.device):
            torch.manual_seed(1)
            step(model, load)
            return gradients(load)

    first = run(load.model)
    for name in ("eager", *budgets):
        model: Any = load.model
        if name in budgets:
            with beside_others(args.device):
                model = rekindle.rematerialize(load.model, budget=budgets[name], **say)
        far = [distance(first, run(model)) for _ in range(args.steps)]
        yield {
            "what": f"{MODEL}, {name}",
            "deterministic": args.deterministic,
            "runs": args.steps,
            "differ": sum(d > 0 for d in far),
            "farthest": max(far),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--plan-limit", type=float, default=5.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "repeatable.jsonl")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    records = [op_alone(args.runs)] if args.runs else []
    records += [steps(args)] if args.steps else []
    for found in records:
        for record in found:
            print(json.dumps(record), flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
