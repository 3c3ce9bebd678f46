"""Random ops, BatchNorm and mutated buffers: what running an op again could disturb."""

import pytest
import torch
import torch.nn.functional as F
from support.compare import random_streams, seed
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import gaussian
from torch import Tensor, nn

from rekindle.errors import PlanMismatch

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


class TwoDropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second(F.dropout(h, 0.5) - F.dropout(h, 0.5)) * F.dropout(h, 0.2)


@EVERY_SCHEDULE
def test_two_dropouts_of_one_tensor_stay_different(schedule: str, device: torch.device) -> None:
    def make():
        torch.manual_seed(0)
        return example_of(TwoDropouts().to(device), lambda step: gaussian(step, device, 8, 16))

    assert_trains_alike(make, schedule, device)

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return F.dropout(h, 0.5) - F.dropout(h, 0.5)

    torch.manual_seed(0)
    example = example_of(Difference().to(device), lambda step: gaussian(step, device, 8, 16))
    assert manage(example, schedule)(gaussian(0, device, 8, 16)).abs().max() > 0


@EVERY_SCHEDULE
@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_dropout_at_the_ends(probability: float, schedule: str, device: torch.device) -> None:
    def make():
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16), nn.Dropout(probability), nn.GELU(), nn.Linear(16, 4)]
        return example_of(
            nn.Sequential(*layers).to(device), lambda step: gaussian(step, device, 8, 16)
        )

    assert_trains_alike(make, schedule, device)


class ManyRandomOps(nn.Module):
    """Random ops of several kinds, in place and with random numbers that no gradient sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.rrelu = nn.RReLU()
        self.spatial = nn.Dropout1d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rrelu(self.layers[0](x))
        x = x + 0.1 * torch.randn_like(x)
        x = self.spatial(self.layers[1](x).unsqueeze(-1)).squeeze(-1)
        noise = torch.empty_like(x).bernoulli_(0.7)
        x = F.dropout(self.layers[2](x * noise), 0.1, inplace=True)
        return x * torch.rand(x.shape[0], 1, device=x.device)


@EVERY_SCHEDULE
def test_random_ops_of_many_kinds(schedule: str, device: torch.device) -> None:
    def make():
        torch.manual_seed(0)
        return example_of(ManyRandomOps().to(device), lambda step: gaussian(step, device, 8, 16))

    assert_trains_alike(make, schedule, device)


@EVERY_SCHEDULE
def test_the_stream_goes_on_as_in_eager_after_the_forward(
    schedule: str, device: torch.device
) -> None:
    """What the caller draws between forward and backward, and after, is what eager would draw."""

    def draws(call: nn.Module) -> list[Tensor]:
        seed(5)
        out = call(gaussian(0, device, 8, 16))
        between = torch.randn(4, device=device)
        out.sum().backward()
        return [between, torch.randn(4, device=device)]

    def build():
        torch.manual_seed(0)
        return example_of(ManyRandomOps().to(device), lambda step: gaussian(step, device, 8, 16))

    expected = draws(build().model)
    got = draws(manage(build(), schedule))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def normalizing(device: torch.device, **options) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8, **options),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8, **options),
        nn.ReLU(inplace=True),
    ).to(device)


@EVERY_SCHEDULE
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}],
    ids=["default", "no-affine", "no-statistics"],
)
def test_batch_norm_statistics_are_updated_once(
    options: dict, schedule: str, device: torch.device
) -> None:
    def make():
        return example_of(
            normalizing(device, **options),
            lambda step: gaussian(step, device, 4, 3, 8, 8, requires_grad=True),
        )

    managed, _ = assert_trains_alike(make, schedule, device)
    if options.get("track_running_stats", True):
        assert int(managed[1].num_batches_tracked) == 3


@EVERY_SCHEDULE
def test_batch_norm_with_a_cumulative_average(schedule: str, device: torch.device) -> None:
    """The weight of the new statistics is a Python number read from a buffer that each step
    changes: a plan holds for one value of it, and must not be used for another."""

    def make():
        return example_of(
            normalizing(device, momentum=None), lambda step: gaussian(step, device, 4, 3, 8, 8)
        )

    assert_trains_alike(make, schedule, device, on_miss="replan")
    example = make()
    managed = manage(example, schedule)
    managed(*example.inputs(0)[0])
    with pytest.raises(PlanMismatch):
        managed(*example.inputs(1)[0])


@EVERY_SCHEDULE
def test_batch_norm_in_eval_inside_a_training_model(schedule: str, device: torch.device) -> None:
    def make():
        example = example_of(
            normalizing(device),
            lambda step: gaussian(step, device, 4, 3, 8, 8, requires_grad=True),
        )
        example.model[1].eval()
        return example

    assert_trains_alike(make, schedule, device)


class Counting(nn.Module):
    """A buffer read, changed in place, and read again: both readings matter to the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.sin(self.linear(x) + self.scale) * self.scale.clone()
        self.scale.mul_(0.5).add_(x.detach().mean(dim=0).abs())
        self.count += 1
        return (before * (self.scale * 2)).cos() * self.scale


@EVERY_SCHEDULE
def test_a_buffer_changed_in_forward_and_used_after(schedule: str, device: torch.device) -> None:
    def make():
        torch.manual_seed(0)
        return example_of(
            Counting().to(device), lambda step: gaussian(step, device, 8, 16, requires_grad=True)
        )

    managed, _ = assert_trains_alike(make, schedule, device)
    assert int(managed.count) == 3


class Replacing(nn.Module):
    """A buffer given a new tensor by assignment, as running averages often are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            self.average.copy_(0.9 * self.average + 0.1 * h.mean(dim=0))
        return (h - self.average).tanh()


@EVERY_SCHEDULE
def test_a_running_average_copied_into_a_buffer(schedule: str, device: torch.device) -> None:
    def make():
        torch.manual_seed(0)
        return example_of(Replacing().to(device), lambda step: gaussian(step, device, 8, 16))

    assert_trains_alike(make, schedule, device)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        before = self.linear(x.sin() * memory.clone() + memory)
        memory.add_(1)
        return (before * memory).sin()


@EVERY_SCHEDULE
def test_an_input_changed_in_place(schedule: str, device: torch.device) -> None:
    def run(call: nn.Module) -> list[Tensor]:
        memory = gaussian(9, device, 8, 16)
        x = gaussian(0, device, 8, 16, requires_grad=True)
        out = call(x, memory)
        out.sum().backward()
        assert x.grad is not None
        return [out, memory, x.grad]

    def build():
        torch.manual_seed(0)
        return example_of(
            ChangesItsInput().to(device),
            lambda step: (
                (gaussian(0, device, 8, 16, requires_grad=True), gaussian(9, device, 8, 16)),
                {},
            ),
        )

    expected = run(build().model)
    got = run(manage(build(), schedule))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


class InPlace(nn.Module):
    """ReLU in place after a linear layer, on a value with two readers, and on a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x), inplace=True)
        g = self.second(h) + h
        g = F.relu(g, inplace=True)
        g = g.clone()
        g[:, :4].mul_(2.0)
        g.t()[4:8].add_(h.t()[4:8])
        return F.hardswish(g, inplace=True)


@EVERY_SCHEDULE
def test_in_place_relu_and_friends(schedule: str, device: torch.device) -> None:
    def make():
        torch.manual_seed(0)
        return example_of(
            InPlace().to(device), lambda step: gaussian(step, device, 8, 16, requires_grad=True)
        )

    assert_trains_alike(make, schedule, device)


@EVERY_SCHEDULE
def test_spectral_norm(schedule: str, device: torch.device) -> None:
    """A parametrization that changes its buffers in place at each forward in training."""

    def make():
        torch.manual_seed(0)
        layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)) for _ in range(2)]
        return example_of(
            nn.Sequential(*layers).to(device), lambda step: gaussian(step, device, 8, 16)
        )

    assert_trains_alike(make, schedule, device)


def test_planning_draws_nothing(device: torch.device) -> None:
    """Noise made from nothing has no tensor that could stand in for it while its call is tried."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + torch.randn(8, 16, device=x.device)).tanh()

    example = example_of(Noisy().to(device), lambda step: gaussian(step, device, 8, 16))
    seed(3)
    before = random_streams(device)
    manage(example, "thrice")
    after = random_streams(device)
    assert all(torch.equal(before[name], after[name]) for name in before)
