"""What an op leaves behind besides its result, when a schedule runs it again: random streams of the
model's own, running statistics."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same, train
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn

import rekindle

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


class OwnStreams(nn.Module):
    """Draws from two generators of its own and from the device's, in turns."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5)).to(device)
        self.masks = torch.Generator(device).manual_seed(3)
        self.held = {"noise": [torch.Generator(device).manual_seed(4)]}

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = self.held["noise"][0]
        for layer in self.layers:
            mask = torch.rand(x.shape, generator=self.masks, device=x.device) > 0.3
            x = F.dropout(torch.tanh(layer(x)) * mask, 0.1)
            x = x + 0.1 * torch.empty_like(x).normal_(generator=noise) * x.sigmoid()
            if generator is not None:
                x = x * torch.bernoulli(x.detach().sigmoid(), generator=generator)
        return x


def streams(model: nn.Module) -> dict[str, Tensor]:
    return {"masks": model.masks.get_state(), "noise": model.held["noise"][0].get_state()}


@EVERY_SCHEDULE
def test_e1_own_generators(schedule: str, device: torch.device) -> None:
    def record(managed: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        generator = torch.Generator(device).manual_seed(5)
        example = example_of(
            OwnStreams(device),
            lambda step: ((gaussian(step, device, 8, 16), generator), {}),
        )
        found = train(example, manage(example, schedule) if managed else None)
        return {**found, **streams(example.model), "given": generator.get_state()}

    assert_same(record(False), record(True))


@pytest.mark.parametrize("budget", [1.0, 0.75])
def test_e1_planning_draws_nothing(budget: float, device: torch.device) -> None:
    torch.manual_seed(0)
    model = OwnStreams(device)
    before, x = streams(model), gaussian(0, device, 8, 16)
    managed = rekindle.rematerialize(model, (x,), budget=budget, profile="measure", cache=False)
    assert_same(before, streams(model))
    assert rekindle.verify(model, managed, (x,))
    assert rekindle.measure(managed, (x,)).peak_bytes > 0
    assert_same(before, streams(model))


class OwnMask(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64).to(device)
        self.masks = torch.Generator(device).manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.masks, device=x.device) > 0.3
        return torch.tanh(self.linear(x)) * mask


def test_e1_own_generators_of_stages(device: torch.device) -> None:
    def record(managed: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(OwnMask(device) for _ in range(6)))
        x = gaussian(0, device, 256, 64)
        call = rekindle.sequential(model, x, budget=0.7) if managed else model
        found: dict[str, Tensor] = {}
        for step in range(2):
            out = call(x)
            out.square().mean().backward()
            found[f"{step} out"] = out.detach().clone()
        found |= {name: p.grad for name, p in model.named_parameters()}
        return found | {f"masks {i}": stage.masks.get_state() for i, stage in enumerate(model)}

    assert_same(record(False), record(True))


class StatisticsPerSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        # One of the norms runs twice in a step, and moves its statistics twice.
        for convolution, norm in zip(self.convolutions, [*self.norms, self.norms[0]], strict=True):
            x = norm(convolution(x)).relu()
        return x * self.norms[1].running_mean.sum()


@EVERY_SCHEDULE
def test_e13_running_statistics_of_instance_norm(schedule: str, device: torch.device) -> None:
    def make() -> Example:
        torch.manual_seed(0)
        return example_of(
            StatisticsPerSample().to(device), lambda step: gaussian(step, device, 3, 4, 6, 6)
        )

    assert_trains_alike(make, schedule, device)
