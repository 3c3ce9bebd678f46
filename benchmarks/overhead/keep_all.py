"""What a managed module adds to eager where nothing is recomputed: time of one forward+backward.

    python benchmarks/overhead/keep_all.py [--device cuda] [-o FILE]

Tiny tensors show the cost per op (the claim: at most 3 microseconds above eager); large ones the
ratio (the claim: at most 1.02). Eager and managed steps alternate in one process, first the one and
then the other in turn, and the median over all pairs counts: what else the machine does hits both.
On a CPU the clock is the thread's own, which stands while others have the core.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.core import keep_all


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def conv_net(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for i in range(8):
        layers += [
            nn.Conv2d(3 if i == 0 else width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Scalar(nn.Module):
    """A network with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += func.namespace != "prim"
        return func(*args, **(kwargs or {}))


def pairs(
    run: Callable[[], None], other: Callable[[], None], clock: Callable[[], float], seconds: float
) -> list[tuple[float, float]]:
    """Seconds of one run of each, many times; the order within a pair alternates."""

    def timed(call: Callable[[], None]) -> float:
        start = clock()
        call()
        return clock() - start

    for _ in range(3):
        run(), other()
    found = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(found) < 10:
        first = timed(run)
        found.append((first, timed(other)))
        second = timed(other)
        found.append((timed(run), second))
    return found


def compare(name: str, model: nn.Module, x: Tensor, seconds: float) -> dict[str, Any]:
    managed = rekindle.rematerialize(
        model, (x,), schedule=keep_all, profile="estimate", on_miss="raise"
    )

    def step(call: nn.Module) -> Callable[[], None]:
        def run() -> None:
            for parameter in model.parameters():
                parameter.grad = None
            call(x).backward()
            if x.is_cuda:
                torch.cuda.synchronize()

        return run

    with Count() as count:
        step(model)()
    clock = time.perf_counter if x.is_cuda else time.thread_time
    found = pairs(step(model), step(managed), clock, seconds)
    ratios = statistics.quantiles([managed_s / eager_s for eager_s, managed_s in found])
    above = statistics.median([managed_s - eager_s for eager_s, managed_s in found])
    return {
        "model": name,
        "num_ops": count.num_ops,
        "num_pairs": len(found),
        "eager_us": round(1e6 * statistics.median([eager_s for eager_s, _ in found]), 1),
        "managed_us": round(1e6 * statistics.median([managed_s for _, managed_s in found]), 1),
        "ratio": round(ratios[1], 4),
        "ratio_quartiles": [round(ratios[0], 4), round(ratios[2], 4)],
        "us_per_op": round(1e6 * above / count.num_ops, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=20.0, help="per model")
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(options.device)
    large = 8 if device.type == "cuda" else 1
    cases = [
        ("tiny GPT", GPT(4, 16, 2, 64), torch.randint(0, 64, (1, 8))),
        ("tiny conv net", Scalar(conv_net(4)), torch.randn(1, 3, 8, 8)),
        ("large GPT", GPT(2, 256 * large, 4, 1024), torch.randint(0, 1024, (4, 128 * large))),
        ("large conv net", Scalar(conv_net(32)), torch.randn(4 * large, 3, 64, 64)),
    ]
    rows = []
    for name, model, x in cases:
        rows.append(compare(name, model.to(device).train(), x.to(device), options.seconds))
        print(json.dumps(rows[-1]), flush=True)
    if options.output:
        with open(options.output, "w") as file:
            json.dump(
                {"torch": torch.__version__, "device": str(device), "rows": rows}, file, indent=1
            )
            file.write("\n")


if __name__ == "__main__":
    main()
