"""What a new user meets in the first ten minutes: typos, budgets out of reach, forgotten modes."""

import itertools
import logging
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.errors import (
    BudgetInfeasible,
    DeviceProfileError,
    InvalidBudget,
    PlanMismatch,
    SolverUnavailable,
)
from rekindle.plan_object import Plan

QUICK: dict[str, Any] = {"profile": "estimate", "time_limit_s": 1, "cache": False}


def mlp(num_blocks: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(num_blocks)]
    return nn.Sequential(*blocks).train()


X = torch.randn(128, 32, generator=torch.Generator().manual_seed(1))


# ---- D2: budgets that cannot be met


def wide() -> tuple[nn.Module, torch.Tensor]:
    """The gradients of the parameters are most of the memory."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers).train(), torch.randn(24, 64)


def test_d2_a_fraction_that_cannot_be_met_is_answered_in_its_own_terms() -> None:
    model, x = wide()
    with pytest.raises(BudgetInfeasible) as refusal:
        rekindle.plan(model, x, budget=0.6, **QUICK)
    said = str(refusal.value)
    assert said.startswith("0.6 of 124.01 KiB = 74.40 KiB cannot be met: the parameters' gradients")
    assert "gradients alone are 97.50 KiB; smallest found 11" in said
    assert said.endswith('Give at least that, budget="min", or best_effort=True to take it')
    share = float(said.partition("(")[2].partition(";")[0])
    assert 0.9 < share <= 1.0
    assert rekindle.plan(model, x, budget=share, **QUICK).overhead >= 0


def test_d2_the_smallest_budget_and_best_effort(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    smallest = rekindle.plan(model, X, budget="min", **QUICK)
    assert smallest.budget_bytes is not None
    assert smallest.peak_bytes <= smallest.budget_bytes < smallest.keep_all_peak_bytes
    with pytest.raises(BudgetInfeasible) as refusal:
        rekindle.plan(model, X, budget="20KiB", **QUICK)
    assert refusal.value.smallest_peak_bytes == smallest.budget_bytes
    caplog.clear()
    managed = rekindle.rematerialize(model, X, budget="20KiB", best_effort=True, **QUICK)
    assert managed.plan.budget_bytes == smallest.budget_bytes
    (said,) = caplog.messages
    assert said.startswith("20.00 KiB cannot be met: ")
    assert "; best effort: smallest found " in said
    assert rekindle.verify(model, managed, X)


@pytest.mark.parametrize("seed", range(6))
def test_e16_what_a_refusal_names_is_feasible(seed: int) -> None:
    """By whichever search, with however little time; and so is everything above it."""
    generator = torch.Generator().manual_seed(seed)
    widths = [8 * int(n) for n in torch.randint(1, 12, (6,), generator=generator)]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    dropouts = [nn.Dropout(0.1) if seed % 2 else nn.Tanh() for _ in layers]
    model = nn.Sequential(*(m for pair in zip(layers, dropouts, strict=True) for m in pair)).train()
    x = torch.randn(64 + 8 * seed, widths[0], generator=generator)
    options = {**QUICK, "time_limit_s": 0.3, "seed": seed}
    with pytest.raises(BudgetInfeasible) as refusal:
        rekindle.plan(model, x, budget="2KiB", **options)
    smallest = refusal.value.smallest_peak_bytes
    assert smallest is not None
    for budget in (smallest, smallest + 1, smallest + 256, smallest + smallest // 20):
        plan = rekindle.plan(model, x, budget=budget, **options)
        assert plan.predict().peak_bytes <= budget == plan.budget_bytes


# ---- D5: one tensor


def test_d5_a_tensor_is_taken_as_the_only_argument(tmp_path: Any) -> None:
    model = mlp()
    plan = rekindle.plan(model, X, budget=0.8, **QUICK)
    plan.save(tmp_path / "plan.json")
    managed = rekindle.rematerialize(model, X, budget=0.8, **QUICK)
    for made in (plan.apply(model, X), Plan.load(tmp_path / "plan.json").apply(model, X), managed):
        assert rekindle.verify(model, made, X, costs=True)
    assert rekindle.measure(managed, X, num_steps=1).peak_bytes == plan.predict().peak_bytes


# ---- D6: a plan for another call


@pytest.mark.parametrize("loaded", [False, True])
def test_d6_a_plan_for_another_call_says_so(loaded: bool, tmp_path: Any) -> None:
    model = mlp()
    plan = rekindle.plan(model, X, budget=0.8, **QUICK)
    if loaded:
        plan.save(tmp_path / "plan.json")
        plan = Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanMismatch, match="made for another graph of 24 ops, and this one has 36"):
        plan.apply(mlp(6), X)
    with pytest.raises(PlanMismatch, match="with the same ops and other sizes"):
        plan.apply(model, X[:100])
    with pytest.raises(PlanMismatch, match="made for another graph"):
        plan.apply(nn.Sequential(nn.Linear(32, 32), nn.Tanh()).train(), X)


# ---- D8: typos and forgotten modes


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"budget": "8gigs"}, InvalidBudget, r"did you mean \"8GiB\"\?"),
        ({"budget": "50%"}, InvalidBudget, r"did you mean 0\.5\?"),
        ({"budget": 8.0}, InvalidBudget, r"did you mean \"8\.0GiB\"\?"),
        ({"budget": 8}, InvalidBudget, r"^budget 8 is 8 bytes; did you mean \"8GiB\"\?"),
        ({"budget": "8"}, InvalidBudget, r"^budget 8 is 8 bytes; did you mean \"8GiB\"\?"),
        ({"budget": 1}, InvalidBudget, r"did you mean \"1GiB\" or 1\.0, all of it\?"),
        ({"device_budget": "24gigs"}, InvalidBudget, r"did you mean \"24GiB\"\?"),
        ({"budget": 0.5, "headroom": 2}, InvalidBudget, r"^headroom 2 is 2 bytes; did you mean"),
        ({"budget": 0.5, "headroom": 2.0}, InvalidBudget, "not a fraction"),
        ({"budget": 0.5, "device_profile": "v100"}, DeviceProfileError, "did you mean 'h?a?100'"),
        ({"budget": 0.5, "solver": "auto2"}, SolverUnavailable, "did you mean 'auto'"),
        ({"budget": 0.5, "optimizer": "adamww"}, InvalidBudget, "did you mean 'adamw'"),
        ({"budget": 0.5, "gap": 5}, InvalidBudget, r"0\.001 is 0\.1 %"),
    ],
)
@pytest.mark.parametrize("with_sample", [True, False])
def test_d8_a_typo_is_refused_before_any_work(
    options: dict[str, Any], error: type[Exception], said: str, with_sample: bool
) -> None:
    class NeverCalled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the model was looked at")

    sample = (X,) if with_sample else None
    with pytest.raises(error, match=said):
        rekindle.rematerialize(NeverCalled(), sample, **options)


def test_d8_a_few_bytes_can_be_meant() -> None:
    with pytest.raises(BudgetInfeasible, match=r"^8 B cannot be met"):
        rekindle.plan(mlp(), X, budget="8B", **QUICK)


def test_d8_the_mode_that_is_planned_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:  # torch traces what Dynamo does through a logger of its own
        return [r.getMessage() for r in caplog.records if r.name == "rekindle"]

    model = mlp(2)
    rekindle.plan(model, X, budget=1.0, **QUICK)
    assert said() == []
    with torch.no_grad():
        plan = rekindle.plan(model, X, budget=1.0, **QUICK)
    assert plan.joint.forward_only
    assert said() == [
        "planning Sequential under no_grad: this plan is for inference, no training step is planned"
    ]
    caplog.clear()
    rekindle.plan(model.eval(), X, budget=1.0, **QUICK)
    (line,) = said()
    assert line.startswith("planning a training step of Sequential in eval mode")


# ---- D9: a plan in a line


def test_d9_a_plan_is_printed_in_a_line() -> None:
    plan = rekindle.plan(mlp(), X, budget=0.8, **QUICK)
    for text in (repr(plan), str(plan), repr(plan.record)):
        assert len(text) < 200
        assert "\n" not in text
        assert "peak" in text


# ---- B5: what the plan says is dropped


class WithLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 1024)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return {"loss": logits.logsumexp(-1).mean(), "logits": logits}


@pytest.mark.parametrize("hold_outputs", [True, False])
def test_b5_outputs_are_held_as_the_plan_says(hold_outputs: bool) -> None:
    model = WithLogits().train()
    managed = rekindle.rematerialize(model, X, budget=1.0, hold_outputs=hold_outputs, **QUICK)
    measured = rekindle.measure(managed, X, num_steps=1).peak_bytes
    assert measured == managed.plan.predict().peak_bytes
    other = rekindle.measure(managed, X, num_steps=1, hold_outputs=not hold_outputs).peak_bytes
    assert (measured > other) is hold_outputs
    assert rekindle.verify(model, managed, X, costs=True).measured.peak_bytes == measured


# ---- D7: costs that were measured on a busy machine


def test_d7_kept_costs_are_measured_anew_or_left_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path))
    model = mlp(1)
    options: dict[str, Any] = {"budget": 1.0, "time_limit_s": 1}

    def sources(**more: Any) -> set[str]:
        return {name for name, n in rekindle.plan(model, X, **options, **more).costs if n}

    assert sources(cache=False) == {"measured"}
    assert not list(tmp_path.rglob("*.json*"))
    assert sources() == {"measured"}
    assert sources() == {"cached"}
    assert sources(cache=False) == {"measured"}
    assert sources(remeasure=True) == {"measured"}
    assert sources() == {"cached"}


def test_d7_a_busy_machine_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rekindle.profile.measure import CpuBench

    def samples(self: CpuBench, run: Any) -> list[float]:
        run()
        return [4e6, 24e3, 48e3]

    monkeypatch.setattr(CpuBench, "_samples_ns", samples)
    with caplog.at_level(logging.WARNING):
        plan = rekindle.plan(mlp(1), X, budget=1.0, cache=False)
    assert any("remeasure=True" in message for message in caplog.messages)
    assert "repeats differ by 100%" in plan.profile.summary()
    # The least of the repeats counts.
    assert {op.device_ns for op in plan.profile.ops if op.device_ns > 0} == {24_000}
