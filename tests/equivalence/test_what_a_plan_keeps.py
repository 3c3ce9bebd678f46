"""What a plan holds of the model and of the sample it was made with: no tensor; and what it takes
to make one where there is no data: no memory."""

import gc
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.core import keep_all


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        scale = 2.0 if bool(factor > 0) else 3.0  # asked of the data
        return (self.linear(x).tanh() * scale).sum()


def sample() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.tensor(1.0)


def are_gone(references: list[Any]) -> bool:
    gc.collect()
    return all(reference() is None for reference in references)


def test_the_sample_is_not_kept() -> None:
    model = Net()
    given = sample()
    seen = [weakref.ref(t) for t in given]
    managed = rekindle.rematerialize(model, given, schedule=keep_all, on_miss="raise")
    del given
    assert are_gone(seen)
    given = sample()
    seen = [weakref.ref(t) for t in given]
    managed(*given).backward()
    managed(*given).backward()
    del given
    assert are_gone(seen)
    assert len(managed.plans) == 1


def test_a_plan_does_not_keep_the_model() -> None:
    model = Net()
    plan = rekindle.plan(model, sample(), schedule=keep_all)
    seen = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model
    assert are_gone(seen)
    assert plan.peak_bytes > 0


def test_the_same_call_is_planned_again_after_its_sample_is_gone() -> None:
    model = Net()
    first = rekindle.plan(model, sample(), schedule=keep_all)
    again = rekindle.plan(model, sample(), schedule=keep_all)
    assert first.peak_bytes == again.peak_bytes


class Wide(nn.Module):
    """Blocks of a size that no machine has, which ask what only meta tensors say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
            for _ in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0], device=x.device)
        if bool((places.diff() == 1).all()):
            x = x + places[:, None]
        for block in self.blocks:
            x = x + block(x)
        return x.sum()


def plan_on_meta(width: int) -> rekindle.Plan:
    with torch.device("meta"):
        model, x = Wide(width), torch.empty(1024, width)
    return rekindle.plan(model, (x,), schedule=keep_all, device_profile="h200")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_a_plan_on_meta_allocates_nothing() -> None:
    plan_on_meta(8)
    before = resident_bytes()
    plan = plan_on_meta(2**20)
    assert plan.peak_bytes > 77 * 2**30
    assert resident_bytes() - before < 32 * 2**20


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * (2.0 if bool(x.sum() > 0) else 3.0)


def test_what_only_data_could_decide_is_named() -> None:
    with torch.device("meta"):
        model, x = Asking(), torch.empty(2, 4)
    with pytest.raises(rekindle.CaptureError, match=r"and args.* has none; give real tensors"):
        rekindle.plan(model, (x,), schedule=keep_all, device_profile="h200")
