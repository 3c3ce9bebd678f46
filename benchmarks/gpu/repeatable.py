"""Whether an op of attention gives the same bits twice: the same inputs, many runs.

    python benchmarks/gpu/repeatable.py --runs 3000

Other blocks are allocated in between, so that outputs and workspaces lie elsewhere. Where an op
does not repeat itself, neither can a model that uses it, managed or not.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
SHAPE = (4, 16, 512, 64)  # batch, heads, length and size of a head: those of GPT-2 with 96 layers


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3000)
    args = parser.parse_args()
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
        print(f"cuDNN attention, {name}: {differing(run, args.runs)} of {args.runs} runs differ")


if __name__ == "__main__":
    main()
