"""The meter counts what it should: known cases, and it notices one tensor too many."""

import torch
from support.meter import LiveMeter, measure_step
from torch import nn


def test_known_sizes() -> None:
    x = torch.ones(256)
    with LiveMeter([x]) as meter:
        a = x + 1  # 1024 bytes
        b = a * 2  # 2048
        view = b[:10]  # no storage of its own
        del a, b
        assert meter.live == 1024
        x.add_(1)  # resident, in place
        c = view + 1
        del view
    assert meter.peak == 2048
    assert meter.live == 64 - 24
    del c
    assert meter.live == 0


def test_an_eager_step_by_hand() -> None:
    """x -> linear -> sin -> out: the peak is worked out on paper."""
    model = nn.Sequential(nn.Linear(4, 64, bias=False))
    x = torch.randn(16, 4)
    meter = measure_step(model, ((x,), {}))
    out, gradient, weight = 16 * 64 * 4, 16 * 64 * 4, 64 * 4 * 4
    assert meter.peak == out + gradient + weight
    assert meter.live == weight


def test_one_tensor_kept_too_long_is_noticed() -> None:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = x * 2
            return super().forward(x)

    x = torch.randn(16, 4)
    plain = measure_step(nn.Linear(4, 64), ((x,), {}))
    keeps = measure_step(Keeps(4, 64), ((x,), {}))
    assert keeps.peak == plain.peak + x.untyped_storage().nbytes()
