"""The public names do what they say."""

import torch
from torch import nn

import rekindle


def test_a_plan_tells_its_curve() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    plan = rekindle.plan(model, args=(torch.randn(64, 16),), budget=1.0, profile="estimate")
    curve = plan.pareto(num_points=4, time_limit_s=4.0)
    assert curve[-1].peak == plan.keep_all_peak_bytes
    assert curve[0].peak < plan.keep_all_peak_bytes
    assert [p.cost for p in curve] == sorted((p.cost for p in curve), reverse=True)


def test_sequential_is_public() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    x = torch.randn(64, 16)
    managed = rekindle.sequential(model, x, budget=1.0)
    assert torch.equal(managed(x), model(x))
