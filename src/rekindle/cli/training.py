"""The training of `demo`: a small GPT on the CPU, eager and within 100, 50 and 30 % of its
activation memory, step by step the same."""

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rekindle.api import rematerialize
from rekindle.cli import show
from rekindle.cli.exits import ExitCode
from rekindle.errors import BudgetInfeasible
from rekindle.profile import measure_step

BUDGETS = (1.0, 0.5, 0.3)
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 256, 128, 128, 4, 4, 8


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True, slots=True)
class Run:
    """What training left: the losses, the gradients of the last step, and what it took."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    peak_bytes: int
    step_s: float

    def same_as(self, other: "Run") -> bool:
        return self.losses == other.losses and all(
            torch.equal(self.gradients[name], other.gradients[name]) for name in self.gradients
        )


def run_training(num_steps: int, *, as_json: bool) -> ExitCode:
    torch.manual_seed(0)
    model = GPT().train()
    text = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 % 61 % VOCABULARY
    eager = _train(copy.deepcopy(model), None, text, num_steps)
    records = [_record("eager", eager, eager, 0.0)]
    for budget in BUDGETS:
        records.append(_budgeted(copy.deepcopy(model), text, num_steps, budget, eager))
        if not as_json:
            print(f"trained at {100 * budget:.0f} % ...", flush=True)
    equal = all(r["gradients_equal"] for r in records if r["peak"] is not None)
    if as_json:
        show.print_json({"steps": num_steps, "runs": records, "gradients_equal": equal})
    else:
        rows = [_row(r) for r in records]
        head = ("budget", "loss", "measured peak", "time per step", "gradients equal")
        print(show.table(head, rows))
    return ExitCode.DONE if equal else ExitCode.NO


def _budgeted(
    model: nn.Module, text: torch.Tensor, num_steps: int, budget: float, eager: Run
) -> dict[str, Any]:
    name = f"{100 * budget:.0f} %"
    try:
        managed = rematerialize(
            model, (text,), budget=budget, time_limit_s=10, profile="estimate", on_miss="raise"
        )
    except BudgetInfeasible as error:
        return {"budget": name, "peak": None, "message": str(error), "gradients_equal": True}
    run = _train(model, managed, text, num_steps)
    return _record(name, run, eager, managed.plan.overhead)


def _train(model: nn.Module, managed: nn.Module | None, text: torch.Tensor, num_steps: int) -> Run:
    call = managed or model
    peak = measure_step(call, (text,), num_steps=1, num_warmup=1).peak_bytes
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1)
    losses, times = [], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        start = time.perf_counter()
        loss = call(text)
        loss.backward()
        times.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
        optimizer.step()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Run(tuple(losses), gradients, peak, sorted(times)[len(times) // 2])


def _record(name: str, run: Run, eager: Run, overhead: float) -> dict[str, Any]:
    return {
        "budget": name,
        "loss": run.losses[-1],
        "peak": run.peak_bytes,
        "peak_share": run.peak_bytes / eager.peak_bytes,
        "step_s": run.step_s,
        "planned_overhead": overhead,
        "gradients_equal": run.same_as(eager),
    }


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    if record["peak"] is None:
        return record["budget"], "-", "infeasible", "-", "-"
    peak = f"{record['peak'] / 2**20:.1f} MiB ({100 * record['peak_share']:.0f} %)"
    return (
        record["budget"],
        f"{record['loss']:.4f}",
        peak,
        f"{1e3 * record['step_s']:.0f} ms",
        "yes" if record["gradients_equal"] else "NO",
    )
