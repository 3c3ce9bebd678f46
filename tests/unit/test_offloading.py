"""Recomputation and moves, decided together."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import rekindle
from rekindle.core import keep_all, simulate
from rekindle.errors import BudgetInfeasible, DeviceProfileError
from rekindle.predict import Predictor


def wide() -> tuple[nn.Module, torch.Tensor]:
    """A model of much arithmetic for its bytes, and little work to capture."""
    layers = [m for _ in range(4) for m in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers).bfloat16(), torch.zeros(32768, 1024, dtype=torch.bfloat16)


def planned(budget: Any = 0.6, offload: Any = False, **options: Any) -> rekindle.Plan:
    model, x = wide()
    how = {"device_profile": "fast", "time_limit_s": 2, "cache": False, **options}
    return rekindle.plan(model, (x,), budget=budget, offload=offload, **how)


@pytest.fixture
def fast(tmp_path: Any) -> str:
    """A device with a link that is fast for its arithmetic."""
    path = tmp_path / "fast.toml"
    path.write_text(
        '[fast]\nlike = "rtx4090"\ntitle = "fast"\nhost = { to_host = 100000000000, from_host = '
        "100000000000, latency_ns = 5000, least_bytes = 1048576, memory_slowdown = 0.2, "
        "compute_slowdown = 0.01 }\n",
        encoding="utf-8",
    )
    return str(path)


def test_a_plan_that_moves_is_predicted_to_be_faster(fast: str) -> None:
    alone = planned(device_profile=fast)
    both = planned(device_profile=fast, offload="auto")
    assert (alone.moved_bytes, alone.problem.transfers, alone.offload) == (0, None, False)
    assert both.moved_bytes > 0
    assert both.offload == "auto"
    assert both.peak_bytes <= both.budget_bytes
    assert both.predict().step_ns <= 0.99 * alone.predict().step_ns
    assert both.bound <= both.cost_ns
    assert "to the host and back" in str(both)
    assert "moved to host memory" in both.explain()
    # The schedule's own time knows no slowdown, so that it is below what is predicted.
    assert both.cost_ns <= both.predict().step_ns


def test_nothing_is_moved_where_it_gains_nothing(fast: str) -> None:
    keeps = planned(1.0, "auto", device_profile=fast)
    assert (keeps.moved_bytes, keeps.problem.transfers) == (0, None)
    assert keeps.overhead == 0.0
    assert keeps.schedule == planned(1.0, device_profile=fast).schedule
    on_cpu = planned(0.6, "auto", device_profile="cpu")
    assert on_cpu.problem.transfers is None
    graphed = replace(planned(0.6, device_profile=fast).options, cuda_graph=True, offload="auto")
    assert graphed.offload == "auto"


def test_the_host_budget_is_kept(fast: str) -> None:
    whole = planned(0.5, "auto", device_profile=fast)
    limit = whole.host_peak_bytes // 2
    less = planned(0.5, f"host_budget {limit}B", device_profile=fast)
    assert less.host_peak_bytes <= limit < whole.host_peak_bytes
    assert less.peak_bytes <= less.budget_bytes
    if less.moved_bytes:
        assert less.runner.lowered.host.num_bytes <= limit


def test_a_budget_that_recomputation_alone_cannot_meet(fast: str) -> None:
    smallest = planned("min", device_profile=fast)
    moving = planned("min", "auto", device_profile=fast)
    assert moving.peak_bytes <= smallest.budget_bytes
    with pytest.raises(BudgetInfeasible):
        planned(smallest.budget_bytes // 3, "auto", device_profile=fast)
    kept = planned(smallest.budget_bytes // 3, "auto", device_profile=fast, best_effort=True)
    assert kept.peak_bytes <= smallest.budget_bytes


def test_wishes_are_about_ops_alone(fast: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = planned(0.6, "auto", device_profile=fast, save=["0"])
    assert plan.moved_bytes == 0
    assert "save= and recompute= are about ops alone" in caplog.text


def test_solutions_are_kept(fast: str) -> None:
    first = planned(0.6, "auto", device_profile=fast, cache=True)
    second = planned(0.6, "auto", device_profile=fast, cache=True)
    assert second.schedule == first.schedule
    assert second.schedule.transfers
    assert second.kept


def test_the_prediction_knows_what_the_lanes_do_not(fast: str) -> None:
    plan = planned(0.6, "auto", device_profile=fast)
    calm = replace(plan.profile.host, memory_slowdown=0.0, compute_slowdown=0.0)
    slow = replace(plan.profile.host, memory_slowdown=1.0, compute_slowdown=1.0)
    times = [
        Predictor(plan.program, replace(plan.profile, host=host), plan.problem).step_ns(
            plan.schedule
        )
        for host in (calm, plan.profile.host, slow)
    ]
    assert times == sorted(times)
    assert times[0] < times[2]
    ops = simulate(plan.problem, keep_all(plan.problem)).cost
    assert times[0] >= ops


def test_a_device_without_a_link(tmp_path: Any) -> None:
    from rekindle.profile import device

    text = (device.resources.files(device.__package__) / "devices.toml").read_text("utf-8")
    rows = [row for row in text.split("\n") if not row.startswith("host = ")]
    path = tmp_path / "own.toml"
    path.write_text("\n".join(rows).replace("[h100]", "[mine]"), encoding="utf-8")
    assert planned(0.6, "auto", device_profile=f"{path}:mine").problem.transfers is None
    with pytest.raises(DeviceProfileError, match="add a table host to it"):
        planned(0.6, "host_budget 1GiB", device_profile=f"{path}:mine")
