"""Budgets for the whole device: what is resident, what is left for a step."""

import pytest
import torch
from torch import nn

from rekindle.errors import BudgetInfeasible, InvalidBudget
from rekindle.predict.device_budget import device_budget, free_bytes, headroom_bytes, residents_of

GIB = 2**30


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(100), requires_grad=False)
        self.register_buffer("table", torch.zeros(50, dtype=torch.int64))


def test_parts_are_counted_once():
    model = Tied()
    found = residents_of(model, args=(torch.zeros(8, 64), {"same": model.table}))
    assert found.parameters_bytes == 64 * 32 * 4 + 400
    assert found.buffers_bytes == 400
    assert found.inputs_bytes == 8 * 64 * 4
    assert found.gradients_bytes == 0
    assert found.step_gradients_bytes == 64 * 32 * 4
    model.first.weight.grad = torch.zeros_like(model.first.weight)
    found = residents_of(model)
    assert found.gradients_bytes == 64 * 32 * 4
    assert found.step_gradients_bytes == 0


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (lambda p: torch.optim.RMSprop(p, centered=True), 2),
        (lambda p: torch.optim.Adagrad(p), 1),
    ],
)
def test_optimizer_state_is_foreseen_before_its_first_step(make, copies):
    model = nn.Linear(40, 30, bias=False)
    optimizer = make(model.parameters())
    before = residents_of(model, optimizer=optimizer)
    # Some make their state, counters of a few bytes included, when they are made.
    assert 0 <= before.optimizer_bytes - copies * 40 * 30 * 4 <= 16
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    after = residents_of(model, optimizer=optimizer)
    assert after.optimizer_missing_bytes == 0
    assert after.optimizer_how == "given"
    # Counters of a few bytes are in the true state and not in the estimate.
    assert 0 <= after.optimizer_bytes - before.optimizer_bytes <= 16


def test_an_optimizer_by_name():
    model = nn.Linear(40, 30)
    assert residents_of(model, optimizer="adamw").optimizer_bytes == 2 * (40 * 30 + 30) * 4
    with pytest.raises(InvalidBudget, match=r"torch\.optim"):
        residents_of(model, optimizer="magic")

    class Odd(torch.optim.Optimizer):
        def __init__(self, params, secret):
            super().__init__(params, {})

        def step(self):
            raise NotImplementedError

    with pytest.raises(InvalidBudget, match="cannot be estimated"):
        residents_of(model, optimizer=Odd(model.parameters(), 3))


def test_the_sum_adds_up_and_is_echoed():
    model = nn.Linear(1024, 1024, bias=False)
    found = residents_of(model, optimizer="adamw")
    budget = device_budget("1GiB", "cpu", found, headroom=0.1)
    assert budget.headroom_bytes == -(-GIB // 10)
    assert budget.step_bytes == GIB - 3 * 4 * 2**20 - budget.headroom_bytes
    first, *rest, last = budget.rows()
    assert first[1] - sum(n for _, n in rest) == last[1]
    text = str(budget)
    assert "1.00 GiB device" in text
    assert "8.00 MiB optimizer state (estimated)" in text
    assert "for one step" in text


def test_auto_is_what_is_free_minus_what_is_to_come():
    model = nn.Linear(1024, 1024, bias=False)
    free = free_bytes(torch.device("cpu"))
    found = residents_of(model, optimizer="adamw")
    budget = device_budget("auto", "cpu", found, headroom=0)
    assert budget.step_bytes == pytest.approx(free - 8 * 2**20, rel=0.2)
    assert budget.step_bytes == budget.device_bytes - 8 * 2**20
    first, *rest, last = budget.rows()
    assert first[1] - sum(n for _, n in rest) == last[1]
    half = device_budget(0.5, "cpu", found, headroom="64MiB")
    assert half.headroom_bytes == 64 * 2**20


def test_a_device_too_small_for_the_residents_is_refused():
    found = residents_of(nn.Linear(1024, 1024), optimizer="adamw")
    with pytest.raises(BudgetInfeasible, match="nothing is left"):
        device_budget("10MiB", "cpu", found)


@pytest.mark.parametrize("headroom", [-0.1, 1.0, float("nan"), True, "lots", -5])
def test_bad_headroom(headroom):
    with pytest.raises(InvalidBudget):
        headroom_bytes(headroom, 1000)
