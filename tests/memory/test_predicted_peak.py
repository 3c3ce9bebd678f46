"""The predicted peak against the allocator's own account of a step, model by model."""

import pytest
import torch
from support.manage import manage
from support.zoo import CASES, Case
from torch import Tensor, nn

import rekindle
from rekindle.profile import Source, load_device

FAST = ("gpt2", "resnet18", "unet", "fno", "lstm", "lora", "mlp-mixer")


def assert_predicted(case: Case, schedule: str, device: torch.device) -> None:
    example = case.build(device)
    args, kwargs = example.inputs(0)
    loss = None if example.own_loss else example.loss
    managed = manage(example, schedule, profile="measure", loss_fn=loss)
    assert managed.plan.profile.not_measured == ()
    predicted = managed.plan.predict()
    measured = rekindle.measure(managed, args, kwargs, num_steps=1)
    assert measured.peak_bytes <= predicted.peak_bytes * 1.0025
    assert predicted.peak_bytes <= 1.05 * measured.peak_bytes


@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in FAST], ids=lambda c: c.name)
def test_peak_is_predicted(case: Case, schedule: str, device: torch.device) -> None:
    assert_predicted(case, schedule, device)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor", "thrice"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_peak_is_predicted_for_all_models(case: Case, schedule: str, device: torch.device) -> None:
    assert_predicted(case, schedule, device)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def test_a_budget_for_the_whole_device_is_kept():
    model, x = Wide(), torch.randn(2048, 256)
    keep_all = rekindle.plan(model, (x,), budget=1.0)
    resident = 6 * (256 * 256 + 256) * 4 + 2048 * 256 * 4
    asked = resident + int(0.6 * keep_all.peak_bytes)
    managed = rekindle.rematerialize(model, (x,), device_budget=asked, headroom=0)
    plan = managed.plan
    assert plan.device_budget.step_bytes == plan.budget_bytes == asked - resident
    measured = rekindle.measure(managed, (x,), num_steps=2)
    assert measured.peak_bytes <= plan.predict().peak_bytes <= plan.budget_bytes
    assert measured.peak_bytes < 0.7 * keep_all.peak_bytes
    with pytest.raises(TypeError, match="both budget and device_budget"):
        rekindle.plan(model, (x,), budget=0.5, device_budget="auto")


def test_the_state_of_an_optimizer_is_left_room():
    model, x = Wide(), torch.randn(2048, 256)
    with_state = rekindle.plan(model, (x,), device_budget="64MiB", optimizer="adamw")
    without = rekindle.plan(model, (x,), device_budget="64MiB")
    assert without.budget_bytes - with_state.budget_bytes == 2 * 6 * (256 * 256 + 256) * 4


def test_a_plan_for_another_device_runs_nothing():
    model, x = Wide(), torch.randn(64, 256)
    plan = rekindle.plan(model, (x,), budget=1.0, device_profile="h200")
    assert plan.profile.device == "h200"
    assert set(plan.profile.num_by_source) == {Source.ESTIMATED}
    assert all(v.size % 512 == 0 for v in plan.problem.values)  # blocks of a GPU's allocator
    assert plan.predict().step_ns > 0
    whole = rekindle.plan(model, (x,), device_budget="auto", device_profile="h200", headroom=0)
    assert whole.device_budget.device_bytes == load_device("h200").memory_bytes
    resident = whole.device_budget.residents.total_bytes
    assert whole.budget_bytes == whole.device_budget.device_bytes - resident


def test_verify_tells_costs_side_by_side():
    model, x = Wide(), torch.randn(256, 256)
    managed = rekindle.rematerialize(model, (x,), budget=1.0)
    verdict = rekindle.verify(model, managed, (x,), costs=True)
    assert verdict.equal
    assert verdict.predicted == managed.plan.predict()
    assert verdict.measured.peak_bytes <= verdict.predicted.peak_bytes
    assert "peak predicted" in str(verdict)
    assert rekindle.verify(model, managed, (x,)).measured is None


def test_the_gradient_of_an_output_dies_where_it_is_used():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    x = torch.randn(512, 64)
    managed = rekindle.rematerialize(model, (x,), budget=0.7, time_limit_s=2.0)
    predicted, measured = managed.plan.predict(), rekindle.measure(managed, (x,), num_steps=1)
    assert measured.peak_bytes <= predicted.peak_bytes
    assert predicted.peak_bytes <= 1.02 * measured.peak_bytes
