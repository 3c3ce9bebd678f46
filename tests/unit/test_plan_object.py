"""A plan that was made and one that was read from a file are one class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.core import keep_all
from rekindle.errors import RekindleError

OF_THE_RECORD = """
    problem schedule peak_bytes cost_ns keep_all_peak_bytes keep_all_cost_ns overhead gap status
    budget_bytes solver bound torch rekindle device graph costs_device costs measured seed
    hold_outputs cuda_graph fuse recompute
"""
CAPTURED = ("joint", "program", "profile", "late_runner", "runner")


def sample() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU()))
    return nn.Sequential(*layers), (torch.randn(64, 16),)


def planned(**options: Any) -> rekindle.Plan:
    given = {"budget": 0.8, "time_limit_s": 2, "profile": "estimate", "cache": False, "seed": 5}
    return rekindle.plan(*sample(), **{**given, **options})


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "3", "hold_outputs": False}, {"schedule": keep_all}],
    ids=["budget", "wish", "schedule"],
)
def test_save_load_apply_save_gives_the_same_file(options: Any, tmp_path: Path) -> None:
    if "schedule" in options:
        options = {**options, "budget": None}
    plan = planned(**options)
    first, second, third = (tmp_path / name for name in ("1.json", "2.json", "3.json"))
    plan.save(first)
    loaded = rekindle.Plan.load(first)
    assert loaded.record == plan.record
    loaded.save(second)
    applied = loaded.apply(*sample(), on_miss="raise").plan
    assert applied.record is loaded.record
    assert applied.captured is not None
    applied.save(third)
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()


def test_a_made_plan_is_applied_with_its_own_record() -> None:
    plan = planned(loss_fn=lambda out: out.square().mean())
    model, args = sample()
    managed = plan.apply(model, args, on_miss="raise")
    assert managed.plan.record is plan.record
    assert managed(*args).dim() == 0  # with the loss of the plan
    assert managed.plan.options.loss_fn is plan.options.loss_fn


def test_what_both_kinds_of_plan_know(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan.json")
    loaded = rekindle.Plan.load(tmp_path / "plan.json")
    for name in OF_THE_RECORD.split():
        assert getattr(loaded, name) == getattr(plan, name), name
    assert all(getattr(plan, name) is not None for name in CAPTURED)
    assert (loaded.device_budget, loaded.kept) == (None, False)
    assert loaded.options.budget == plan.budget_bytes
    assert [p.peak for p in loaded.pareto(3, 1.0)] == [p.peak for p in plan.pareto(3, 1.0)]
    assert loaded.explain("3") == plan.explain("3")


def test_a_plan_from_a_file_says_that_it_needs_a_model(tmp_path: Path) -> None:
    planned().save(tmp_path / "plan.json")
    loaded = rekindle.Plan.load(tmp_path / "plan.json")
    with pytest.raises(RekindleError, match=r"call plan\.apply\(model, args\)"):
        loaded.predict()
    for name in CAPTURED:
        with pytest.raises(RekindleError, match="has no captured model"):
            getattr(loaded, name)
    assert loaded.apply(*sample()).plan.predict().peak_bytes >= loaded.peak_bytes
