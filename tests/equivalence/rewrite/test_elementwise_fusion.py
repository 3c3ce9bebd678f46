"""Chains of elementwise ops as one op: the same bits, fewer values.

On a GPU the kernels themselves are compared; elsewhere the separate ops stand in for them, so that
the choice of what is made and what is computed again is tested everywhere.
"""

import copy
import importlib
from collections.abc import Callable

import pytest
import torch
from support.schedules import Scheduler, floor, sqrt, thrice
from torch import nn

import rekindle
from rekindle.core import keep_all, simulate
from rekindle.rewrite import graph_edit

fuse = importlib.import_module("rekindle.rewrite.elementwise_fusion")
F = nn.functional


pytestmark = pytest.mark.usefixtures("fuse_anywhere")


class Net(nn.Module):
    """A linear layer, what is to be tested, a linear layer."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)
        self.gain = nn.Parameter(torch.rand(64) + 0.5)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self.first(x), self.gain)).float().square().mean()


def new_gelu(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def rms_norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return gain * wide.to(x.dtype)


def swiglu(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * (x * gain)


def gates(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x / 3.0) - 0.25
    return (gate * x + gain) * torch.tanh(-x) / (1.5 + gate)


def shared(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """A value that a sum reads as well, and one under another shape."""
    y = x * gain + 1.0
    total = y.sum(-1, keepdim=True)
    return (y.view(-1) * 2.0).view(x.shape) + total * (y * y)


def dropped(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.relu(x * gain), 0.25) + F.dropout(F.gelu(x + gain), 0.5)


def rotary(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Heads that lie beside each other, turned by angles that all of them share."""
    heads = x.view(2, 24, 4, 16).transpose(1, 2)
    angles = torch.outer(torch.arange(24, device=x.device) / 7, gain[:16].float())
    cos, sin = angles.cos().to(x.dtype)[None, None], angles.sin().to(x.dtype)[None, None]
    turned = torch.cat([-heads[..., 8:], heads[..., :8]], -1)
    return (heads * cos + turned * sin).transpose(1, 2).reshape(x.shape)


def channels_last(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """A number per channel, where channels lie together, and one per picture and channel."""
    pictures = x.view(3, 8, 8, 16).permute(0, 3, 1, 2)
    each = gain[:48].view(3, 16, 1, 1)
    y = pictures * gain[:16].view(1, 16, 1, 1) + torch.tanh(pictures) * each
    return y.permute(0, 2, 3, 1).reshape(x.shape)


def channels_first(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    pictures = x.view(3, 16, 8, 8)
    y = pictures * gain[:16].view(1, 16, 1, 1) + torch.tanh(pictures)
    return (y * gain[:48].view(3, 16, 1, 1) + y).view(x.shape)


def halves(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Two parts of one tensor."""
    a, b = x.chunk(2, -1)
    y = F.silu(a) * b
    return torch.cat([y, y + a], -1) * gain


FUNCTIONS = [new_gelu, rms_norm, swiglu, gates, shared, dropped]
FUNCTIONS += [rotary, channels_last, channels_first, halves]


def _model(function: Callable[..., torch.Tensor], dtype: torch.dtype, device: torch.device) -> Net:
    torch.manual_seed(0)
    return Net(function).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", [keep_all, sqrt, floor, thrice], ids=lambda s: s.__name__)
def test_the_same_bits(
    function: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    schedule: Scheduler,
    device: torch.device,
) -> None:
    model = _model(function, dtype, device)
    x = torch.randn(48, 32, device=device, dtype=dtype, requires_grad=True)
    managed = rekindle.rematerialize(model, (x,), schedule=schedule, profile="estimate")
    names = [op.name for op in managed.plan.problem.ops if op.name.startswith("fused_")]
    assert names, "nothing was joined"
    assert None not in fuse._targets.values(), "a kernel is not exact"
    verdict = rekindle.verify(model, managed, (x,))
    assert verdict.equal, verdict.differences


@pytest.mark.parametrize("function", [new_gelu, rms_norm, swiglu], ids=lambda f: f.__name__)
def test_less_is_kept(
    function: Callable[..., torch.Tensor],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _model(function, torch.bfloat16, device)
    x = torch.randn(512, 32, device=device, dtype=torch.bfloat16)
    peaks = []
    for smallest in (1 << 40, 64):
        monkeypatch.setattr(graph_edit, "MIN_NUMEL", smallest)
        plan = rekindle.plan(model, (x,), budget="1GiB", solver="keep-all", profile="estimate")
        peaks.append(simulate(plan.problem, keep_all(plan.problem)).peak)
    assert peaks[1] < 0.8 * peaks[0]


def test_an_argument_may_change_before_the_backward(device: torch.device) -> None:
    """What only the forward read of an argument is not read again in the backward."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x * 2.0 + 1.0) * self.weight).tanh().sum()

    model = Scaled().to(device)
    x = torch.randn(32, 64, device=device)
    managed = rekindle.rematerialize(copy.deepcopy(model), (x,), budget=1.0, profile="estimate")
    grads = []
    for each in (model, managed):
        given = x.clone()
        loss = each(given)
        given.zero_()
        loss.backward()
        grads.append(each.weight.grad.clone())
    assert torch.equal(*grads)


def test_what_is_written_is_left_alone(device: torch.device) -> None:
    def function(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        y = x * gain
        z = torch.tanh(y + 1.0)
        y = y.clone()
        y.add_(3.0)
        return y * z + y

    model = _model(function, torch.float32, device)
    x = torch.randn(48, 32, device=device)
    for schedule in (keep_all, sqrt, thrice):
        managed = rekindle.rematerialize(model, (x,), schedule=schedule, profile="estimate")
        assert rekindle.verify(model, managed, (x,)).equal


def test_operands_that_are_not_aligned(device: torch.device) -> None:
    """A parameter may lie anywhere in a larger buffer."""
    model = _model(swiglu, torch.float32, device)
    x = torch.randn(48, 32, device=device)
    managed = rekindle.rematerialize(model, (x,), budget=1.0, profile="estimate")
    room = torch.empty(65, device=device)
    with torch.no_grad():
        room[1:].copy_(model.gain)
    model.gain.data = room[1:]
    assert rekindle.verify(model, managed, (x,)).equal
