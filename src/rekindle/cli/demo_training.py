"""The training of `demo`: a small GPT on the CPU, eager and within 100, 50 and 30 % of its
activation memory. All runs start from the same weights and seed, so their losses and gradients must
be bitwise identical."""

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rekindle.api import rematerialize
from rekindle.cli import printing
from rekindle.cli.exit_codes import ExitCode
from rekindle.errors import BudgetInfeasible
from rekindle.plan_object import Plan
from rekindle.predict import StepMeasurement, measure_step
from rekindle.report import verdict

BUDGETS = (1.0, 0.5, 0.3)
REPORTED = 0.5  # the budget that the report page is about
CURVE_LIMIT_S = 4.0
# Small enough to train on a CPU in seconds.
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 256, 128, 128, 4, 4, 8


# Dropout is included on purpose: a recomputed dropout must draw the same mask.
class Block(nn.Module):  # type: ignore[misc]
    """A transformer block, with dropout."""

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
    """A small language model that returns its loss."""

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
    """Results of a training run: losses, gradients of the last step, peak and time."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    measured: StepMeasurement
    step_s: float
    plan: Plan | None = None

    def same_as(self, other: "Run") -> bool:
        return self.losses == other.losses and all(
            torch.equal(self.gradients[name], other.gradients[name]) for name in self.gradients
        )


def run_training(num_steps: int, page: str, *, as_json: bool) -> ExitCode:
    """Trains with and without a budget, prints a table, and writes the report of one plan."""
    torch.manual_seed(0)
    model = GPT().train()
    text = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * 7 % 61 % VOCABULARY
    eager = _train(copy.deepcopy(model), None, text, num_steps)
    records = [_record("eager", eager, eager)]
    reported = None
    for budget in BUDGETS:
        run = _budgeted(copy.deepcopy(model), text, num_steps, budget)
        if isinstance(run, Run):
            record = _record(_share(budget), run, eager)
            reported = run if budget == REPORTED or reported is None else reported
        else:
            record = {
                "budget": _share(budget), "peak": None, "message": str(run), "gradients_equal": True
            }  # fmt: skip
        records.append(record)
        if not as_json:
            print(f"trained at {record['budget']}. {record.get('verdict') or run}", flush=True)
    equal = all(r["gradients_equal"] for r in records)
    assert reported is not None
    assert reported.plan is not None
    path = reported.plan.report(page, measured=reported.measured, time_limit_s=CURVE_LIMIT_S)
    if as_json:
        printing.print_json(
            {"steps": num_steps, "runs": records, "gradients_equal": equal, "report": str(path)}
        )
    else:
        head = ("budget", "loss", "measured peak", "time per step", "bitwise identical")
        print(printing.table(head, [_row(r) for r in records]))
        print(f"Report page of the plan at {_share(REPORTED)}: {path}")
    return ExitCode.DONE if equal else ExitCode.CHECK_FAILED


def _share(budget: float) -> str:
    return f"{100 * budget:.0f} %"


def _budgeted(
    model: nn.Module, text: torch.Tensor, num_steps: int, budget: float
) -> "Run | BudgetInfeasible":
    try:
        managed = rematerialize(model, (text,), budget=budget, time_limit_s=5, on_miss="raise")
    except BudgetInfeasible as error:
        return error
    return _train(model, managed, text, num_steps)


def _train(model: nn.Module, managed: nn.Module | None, text: torch.Tensor, num_steps: int) -> Run:
    call = managed or model
    # Before training: measuring leaves parameters, gradients and generators as they were.
    measured = measure_step(call, (text,), num_steps=5, num_warmup=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1)  # the same dropout masks in all runs
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
    plan = None if managed is None else managed.plan
    # The median: the first step includes lowering and warm-up.
    return Run(tuple(losses), gradients, measured, sorted(times)[len(times) // 2], plan)


def _record(name: str, run: Run, eager: Run) -> dict[str, Any]:
    peak, whole = run.measured.peak_bytes, eager.measured.peak_bytes
    record: dict[str, Any] = {
        "budget": name,
        "loss": run.losses[-1],
        "peak": peak,
        "peak_share": peak / whole,
        "step_s": run.step_s,
        "planned_overhead": 0.0 if run.plan is None else run.plan.overhead,
        "gradients_equal": run.same_as(eager),
    }
    if run.plan is not None:
        record["verdict"] = verdict(run.plan.account())
    return record


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
