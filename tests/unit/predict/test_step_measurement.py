"""A step as it really runs: its peak and time, and no trace left."""

import torch
from torch import nn

from rekindle.predict.step_measurement import Prediction, measure_step


class Stepper(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return nn.functional.dropout(self.linear(self.norm(x)))


def test_the_peak_is_the_allocators():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return ((x * self.scale).sin().exp()).sum()

    x = torch.randn(1000)
    found = measure_step(Chain(), (x,), num_steps=2)
    # Kept for the backward: x * scale, exp; at the worst moment two more vectors and scalars.
    assert 3 * 4000 <= found.peak_bytes <= 5 * 4000
    assert found.step_ns > 0
    assert found.num_steps == 2


def test_no_trace_is_left():
    model = Stepper()
    model.linear.weight.grad = torch.full_like(model.linear.weight, 3.0)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(8, 16, requires_grad=True)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measure_step(model, (x,), num_steps=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(model.linear.weight.grad, torch.full_like(model.linear.weight, 3.0))
    assert model.linear.bias.grad is None
    assert x.grad is None


def test_losses_of_all_kinds():
    class Out(dict):
        loss = None

    class WithLoss(Stepper):
        def forward(self, x):
            return {"loss": super().forward(x).sum(), "logits": x}

    x = torch.randn(8, 16)
    assert measure_step(WithLoss(), (x,), num_steps=1).peak_bytes > 0
    assert measure_step(Stepper(), (), {"x": x}, num_steps=1).peak_bytes > 0
    assert measure_step(Stepper(), (x,), loss=lambda o: o.square().mean()).peak_bytes > 0


def test_prediction_beside_measurement():
    found = measure_step(Stepper(), (torch.randn(8, 16),), num_steps=1)
    text = Prediction(found.peak_bytes, 2 * found.step_ns, 3 * found.reserved_bytes).against(found)
    assert "(ratio 1.000)" in text
    assert "(ratio 2.000)" in text
    assert "(ratio 3.000)" in text
