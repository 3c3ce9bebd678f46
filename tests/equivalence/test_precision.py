"""Dtypes and layouts: autocast, GradScaler, bf16, channels_last, a model moved after planning."""

import copy

import pytest
import torch
from support.compare import assert_same, seed, train
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn

from rekindle.errors import PlanMismatch

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


def convolutions(device: torch.device) -> Example:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 16, 10),
    )
    return example_of(
        model.to(device), lambda step: gaussian(step, device, 4, 3, 8, 8, requires_grad=True)
    )


def perceptron(device: torch.device, dtype: torch.dtype = torch.float32) -> Example:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)
    )

    def inputs(step: int) -> Tensor:
        return gaussian(step, device, 8, 16).to(dtype).requires_grad_()

    return example_of(model.to(device, dtype), inputs)


@EVERY_SCHEDULE
def test_autocast(schedule: str, device: torch.device) -> None:
    def autocast() -> torch.autocast:
        return torch.autocast(device.type, dtype=torch.bfloat16)

    expected = train(convolutions(device), around=autocast)
    example = convolutions(device)
    with autocast():
        managed = manage(example, schedule)
    assert_same(expected, train(example, managed, around=autocast))


@EVERY_SCHEDULE
def test_backward_outside_autocast(schedule: str, device: torch.device) -> None:
    def run(example: Example, call: nn.Module) -> list[Tensor]:
        seed(1)
        x = example.inputs(0)[0][0]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = call(x)
            loss = out.float().square().mean()
        loss.backward()
        return [out, loss, x.grad, *(p.grad for p in call.parameters())]

    plain, example = convolutions(device), convolutions(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        managed = manage(example, schedule)
    expected, got = run(plain, plain.model), run(example, managed)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


class Mixed(nn.Module):
    """Of matrix products, of which one takes part in full precision, and of elementwise ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        with torch.autocast(x.device.type, enabled=False):
            x = torch.tanh(self.layers[1](x.float()))
        return self.layers[3](torch.nn.functional.gelu(self.layers[2](x)))


@pytest.mark.parametrize("forward_inside", [True, False])
@EVERY_SCHEDULE
def test_backward_inside_autocast(
    schedule: str, forward_inside: bool, device: torch.device
) -> None:
    """There eager casts the backward's own products. The first step finds that out; the next ones
    are planned for it; and a backward outside is as exact after it as before."""
    kind = torch.bfloat16

    def make() -> Example:
        torch.manual_seed(0)
        return example_of(
            Mixed().to(device), lambda step: gaussian(step, device, 8, 16, requires_grad=True)
        )

    def run(example: Example, call: nn.Module) -> list[Tensor]:
        found = []
        for step, inside in enumerate((True, True, False, True)):
            call.zero_grad()
            x = example.inputs(step)[0][0]
            with torch.autocast(device.type, dtype=kind, enabled=forward_inside):
                loss = call(x).float().square().mean()
            with torch.autocast(device.type, dtype=kind, enabled=inside):
                loss.backward()
            found += [loss, x.grad, *(p.grad.clone() for p in call.parameters())]
        return found

    plain, example = make(), make()
    with torch.autocast(device.type, dtype=kind, enabled=forward_inside):
        managed = manage(example, schedule)
    expected, got = run(plain, plain.model), run(example, managed)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_a_backward_inside_autocast_differs(device: torch.device) -> None:
    """Else the test above would compare nothing."""
    torch.manual_seed(0)
    model = Mixed().to(device)
    found = []
    for inside in (False, True):
        model.zero_grad()
        loss = model(gaussian(0, device, 8, 16)).square().mean()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=inside):
            loss.backward()
        found.append(model.layers[0].weight.grad.clone())
    assert not torch.equal(*found)


def test_autocast_at_the_call_but_not_at_the_plan(device: torch.device) -> None:
    example = perceptron(device)
    managed = manage(example)
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(PlanMismatch):
        managed(*example.inputs(0)[0])
    plain, example = perceptron(device), perceptron(device)
    eager = manage(example, on_miss="eager")
    with torch.autocast(device.type, dtype=torch.bfloat16):
        seed(1)
        expected = plain.model(*plain.inputs(0)[0])
        seed(1)
        with pytest.warns(UserWarning, match="eager"):
            got = eager(*example.inputs(0)[0])
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@EVERY_SCHEDULE
def test_grad_scaler(schedule: str, device: torch.device) -> None:
    def run(example: Example, call: nn.Module) -> list[Tensor]:
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        optimizer = example.make_optimizer()
        seed(1)
        losses = []
        for step in range(3):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = example.loss(call(*example.inputs(step)[0]).float())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(call.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.detach().clone() for p in call.parameters())]

    plain, example = perceptron(device), perceptron(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        managed = manage(example, schedule)
    expected, got = run(plain, plain.model), run(example, managed)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@EVERY_SCHEDULE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "f64"])
def test_other_dtypes(dtype: torch.dtype, schedule: str, device: torch.device) -> None:
    assert_trains_alike(lambda: perceptron(device, dtype), schedule, device)


@EVERY_SCHEDULE
def test_channels_last(schedule: str, device: torch.device) -> None:
    def make():
        plain = convolutions(device)
        model = nn.Sequential(*list(plain.model)[:5]).to(memory_format=torch.channels_last)

        def inputs(step: int) -> Tensor:
            x = gaussian(step, device, 4, 3, 8, 8)
            return x.to(memory_format=torch.channels_last).requires_grad_()

        return example_of(model, inputs)

    managed, _ = assert_trains_alike(make, schedule, device)
    x = gaussian(0, device, 4, 3, 8, 8).to(memory_format=torch.channels_last)
    out = managed(x.requires_grad_())
    assert out.is_contiguous(memory_format=torch.channels_last)


class BatchOfOne(nn.Module):
    """A view that gives the batch dimension of size one a stride of its own, then a kernel that
    asks for the memory format: what eager answers there, only real tensors know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.GroupNorm(8, 32)
        self.convolution = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).transpose(1, 2).view(x.shape[0], 32, 8, 8)
        h = self.norm(h / 2.0) + torch.sigmoid(h) + self.norm(h)
        return self.convolution(h * h)


@EVERY_SCHEDULE
@pytest.mark.parametrize("batch", [1, 2])
def test_a_batch_of_one(batch: int, schedule: str, device: torch.device) -> None:
    def make() -> Example:
        torch.manual_seed(0)
        return example_of(
            BatchOfOne().to(device),
            lambda step: gaussian(step, device, batch, 64, 32, requires_grad=True),
        )

    assert_trains_alike(make, schedule, device)


class TurnedNorm(nn.Module):
    """Layer norm between transposes: the layout of its gradient decides whether eager copies it
    before the view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 32 * 16)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).view(-1, 32, 16).transpose(1, 2)
        return self.norm(h.roll(1, 1)).transpose(1, 2).contiguous()


@EVERY_SCHEDULE
def test_a_norm_between_transposes(schedule: str, device: torch.device) -> None:
    def make() -> Example:
        torch.manual_seed(0)
        return example_of(
            TurnedNorm().to(device),
            lambda step: gaussian(step, device, 4, 8, requires_grad=True),
        )

    assert_trains_alike(make, schedule, device)


def test_other_strides_than_planned_are_not_covered(device: torch.device) -> None:
    example = convolutions(device)
    managed = manage(example)
    x = gaussian(0, device, 4, 3, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    with pytest.raises(PlanMismatch):
        managed(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["f64", "bf16"])
def test_a_model_moved_to_another_dtype_after_planning(
    dtype: torch.dtype, device: torch.device
) -> None:
    expected = train(perceptron(device, dtype))
    example = perceptron(device)
    managed = manage(example, "thrice", on_miss="replan")
    train(copy.deepcopy(example))
    managed.to(dtype)
    moved = perceptron(device, dtype)
    moved_example = Example(managed, moved.inputs, moved.loss, optimizer=moved.optimizer)
    assert_same(expected, train(moved_example))
    example = perceptron(device)
    managed = manage(example, "thrice").to(dtype)
    with pytest.raises(PlanMismatch):
        managed(*moved.inputs(0)[0])
    example = perceptron(device)
    managed = manage(example, "thrice", on_miss="eager").to(dtype)
    with pytest.warns(UserWarning, match="eager"):
        managed(*moved.inputs(0)[0]).sum().backward()
