"""`count_gradients=False`: the gradients of parameters come on top of the budget."""

import pytest
import torch
from torch import nn

import rekindle
from rekindle.errors import BudgetInfeasible

QUICK = {"profile": "estimate", "time_limit_s": 2.0}
BATCH = 256


class Tied(nn.Module):
    """Two layers with one weight, and an input with a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return x.sum()


def gradients_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


@pytest.mark.parametrize("needs_grad", [False, True])
def test_bytes_and_fractions(needs_grad):
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(BATCH, 64, requires_grad=needs_grad)
    on_top = gradients_bytes(model)  # the tied weight once, the input's not at all
    counted = rekindle.plan(model, x, budget=0.6, **QUICK)
    whole = rekindle.plan(model, x, budget=1.0, **QUICK).budget_bytes
    asked = 300_000
    plan = rekindle.plan(model, x, budget=asked, count_gradients=False, **QUICK)
    assert plan.budget_bytes == asked + on_top
    plan = rekindle.plan(model, x, budget=0.6, count_gradients=False, **QUICK)
    assert plan.budget_bytes == int(0.6 * (whole - on_top)) + on_top
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.budget_bytes > counted.budget_bytes
    assert rekindle.plan(model, x, budget=1.0, count_gradients=False, **QUICK).overhead == 0.0


def test_a_budget_below_the_gradients_can_be_met():
    """A wide layer on a small batch: its gradient alone is above the budget."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(512, 512), nn.Tanh()), torch.randn(4, 512)
    budget = gradients_bytes(model) // 2
    with pytest.raises(BudgetInfeasible, match="gradients"):
        rekindle.plan(model, x, budget=budget, **QUICK)
    managed = rekindle.rematerialize(model, x, budget=budget, count_gradients=False, **QUICK)
    rekindle.verify(model, managed, x)
    with pytest.raises(BudgetInfeasible, match="and the parameters' gradients"):
        rekindle.plan(model, x, budget=1024, count_gradients=False, **QUICK)
