"""Writes in place between the forward and the backward: eager's result where eager allows them,
eager's error where it does not, and never a wrong gradient; and what a step keeps alive."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import Record, assert_same, keep, seed
from support.manage import example_of, manage
from support.random_models import RandomModel
from support.schedules import SCHEDULES
from support.zoo import gaussian
from torch import Tensor, nn

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)
REFUSED_BY_EAGER = "modified by an inplace operation"
Write = Callable[[Any, Tensor], Tensor]  # outputs, input -> the loss, with a write on the way


class Deep(nn.Module):
    """Four layers, then what `end` makes of their result and of the input."""

    def __init__(self, end: Callable[[Tensor, Tensor], Any], shift: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.end, self.shift = end, shift

    def forward(self, x: Tensor) -> Any:
        h = x + 1 if self.shift else x
        for layer in self.layers:
            h = torch.tanh(layer(h)) + 0.5
        return self.end(h, x)


def outcome(
    make: Callable[[], nn.Module], write: Write, schedule: str | None, device: torch.device
) -> Record | str:
    """The gradients of one step, or the error of its backward."""
    torch.manual_seed(0)
    model = make().to(device)
    x = gaussian(0, device, 8, 16)
    call: nn.Module = model
    if schedule is not None:
        call = manage(example_of(model, lambda step: gaussian(step, device, 8, 16)), schedule)
    seed(3)
    out = call(x)
    try:
        write(out, x).backward()
    except RuntimeError as error:
        return type(error).__name__ + " " + str(error)
    record = {name: keep(p.grad) for name, p in model.named_parameters()}
    return {**record, "x": keep(x), **{f"out {i}": keep(t) for i, t in enumerate(leaves(out))}}


def leaves(out: Any) -> list[Tensor]:
    return list(out) if isinstance(out, tuple) else [out]


def assert_as_eager(make: Callable[[], nn.Module], write: Write, schedule: str, device) -> str:
    """Equal gradients, or an error of both; returns the error."""
    expected = outcome(make, write, None, device)
    got = outcome(make, write, schedule, device)
    if isinstance(expected, str):
        assert REFUSED_BY_EAGER in expected
        assert isinstance(got, str), "eager refuses it"
        assert REFUSED_BY_EAGER in got
        return got
    assert not isinstance(got, str), got
    assert_same(expected, got)
    return ""


def doubled(out: Tensor, x: Tensor) -> Tensor:
    return out.mul_(2).sum()


def zeroed_after_the_loss(out: Tensor, x: Tensor) -> Tensor:
    loss = out.sum()
    out.detach().zero_()
    return loss


def second_zeroed(out: tuple[Tensor, ...], x: Tensor) -> Tensor:
    out[1].detach().zero_()
    return out[0].sum()


def second_written_without_grad(out: tuple[Tensor, ...], x: Tensor) -> Tensor:
    with torch.no_grad():
        out[1].mul_(0)
    return out[0].sum()


def refilled(out: Tensor, x: Tensor) -> Tensor:
    x.fill_(7.0)
    return out.sum()


@EVERY_SCHEDULE
@pytest.mark.parametrize("write", [doubled, zeroed_after_the_loss])
def test_e8_an_output_that_eager_keeps(write: Write, schedule: str, device: torch.device) -> None:
    error = assert_as_eager(lambda: Deep(lambda h, x: h.tanh()), write, schedule, device)
    assert "output tensor 0" in error
    assert f"made at {__file__}" in error


@EVERY_SCHEDULE
@pytest.mark.parametrize("write", [doubled, zeroed_after_the_loss])
def test_e8_an_output_that_eager_has_done_with(
    write: Write, schedule: str, device: torch.device
) -> None:
    assert assert_as_eager(lambda: Deep(lambda h, x: h * 2), write, schedule, device) == ""


@EVERY_SCHEDULE
@pytest.mark.parametrize("write", [second_zeroed, second_written_without_grad])
def test_e8_an_output_that_the_model_reads_itself(
    write: Write, schedule: str, device: torch.device
) -> None:
    """Eager does not keep it; a schedule that runs its readers again does."""

    def end(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = h + x
        return ((middle + 1) * 0.5).sigmoid() + x, middle

    def detached(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = end(h, x)
        return first, second.detach()

    assert assert_as_eager(lambda: Deep(end), write, schedule, device) == ""
    assert assert_as_eager(lambda: Deep(detached), write, schedule, device) == ""


@EVERY_SCHEDULE
def test_e8_outputs_over_one_storage(schedule: str, device: torch.device) -> None:
    """A write through one is a write to the other, for what the caller's own loss keeps too."""

    def kept_by_the_loss(out: tuple[Tensor, ...], x: Tensor) -> Tensor:
        loss = out[0].square().sum()
        out[1].zero_()
        return loss

    def end(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        out = h * 2
        return out, out.detach().view(-1)[:40]

    assert REFUSED_BY_EAGER in assert_as_eager(
        lambda: Deep(end), kept_by_the_loss, schedule, device
    )
    assert assert_as_eager(lambda: Deep(end), second_zeroed, schedule, device) == ""

    def written_with_grad(out: tuple[Tensor, ...], x: Tensor) -> Tensor:
        out[1].mul_(3)
        return out[0].sum()

    def entangled(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        out = h * 2
        return out, out[0]

    got = outcome(lambda: Deep(entangled), written_with_grad, schedule, device)
    assert isinstance(got, str)
    assert got.startswith("ChangedInPlace")
    assert "clone" in got


@EVERY_SCHEDULE
def test_e8_an_input_refilled(schedule: str, device: torch.device) -> None:
    def plain(h: Tensor, x: Tensor) -> Tensor:
        return h * 2

    error = assert_as_eager(lambda: Deep(plain), refilled, schedule, device)
    assert "input args[0][0]" in error
    if schedule == "keep-all":
        assert assert_as_eager(lambda: Deep(plain, True), refilled, schedule, device) == ""
        return
    # Eager has done with it; a plan that begins again from it has not, and says so.
    got = outcome(lambda: Deep(plain, True), refilled, schedule, device)
    assert isinstance(got, str)
    assert got.startswith("ChangedInPlace")
    assert "input args[0][0]" in got
    assert "Change a clone" in got


class Counts(nn.Module):
    """Writes to a buffer and to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.ones(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        x.mul_(2)
        out = self.linear(x).tanh() + self.calls
        return out, out.detach()[0]


@EVERY_SCHEDULE
def test_e8_writes_of_the_forward_itself_are_counted(schedule: str, device: torch.device) -> None:
    """What the caller's own graph has kept of a buffer or an argument, forward writes over."""
    torch.manual_seed(0)
    model = Counts().to(device)
    inputs = example_of(model, lambda step: gaussian(step, device, 8, 16))
    for call in (model, manage(inputs, schedule)):
        for of_buffer in (True, False):
            x = gaussian(0, device, 8, 16)
            kept = model.calls if of_buffer else x
            factor = torch.ones(16, device=device, requires_grad=True)
            loss = (kept * factor).sum()
            call(x)
            with pytest.raises(RuntimeError, match=REFUSED_BY_EAGER):
                loss.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_e8_without_gradients(mode: Callable[[], Any], device: torch.device) -> None:
    """Outputs over one storage stay so, and a write through one is seen in the other."""
    torch.manual_seed(0)
    plain = Counts().to(device)
    with mode():
        expected = plain(gaussian(0, device, 8, 16))
        torch.manual_seed(0)
        model = Counts().to(device)
        inputs = example_of(model, lambda step: gaussian(step, device, 8, 16))
        got = manage(inputs, "keep-all")(gaussian(0, device, 8, 16))
        assert all(map(torch.equal, expected, got))
        assert torch.equal(plain.calls, model.calls)
        got[1].zero_()
        assert not got[0][0].any()


def random_write(number: int) -> Write:
    source = random.Random(number)

    def write(out: tuple[Tensor, ...], x: Tensor) -> Tensor:
        able = [t for t in out if t.requires_grad]
        target = source.choice([*out, *out, x])
        way = source.randrange(3)
        loss = None
        if source.random() < 0.5:
            loss = sum(t.sum() for t in able)
        if way == 0 and loss is None and target is not x and target.requires_grad:
            target.mul_(1.5)
        elif way == 1:
            target.detach().zero_()
        else:
            with torch.no_grad():
                target.add_(1.0)
        return sum(t.square().sum() for t in able) if loss is None else loss

    return write


class OneInput(nn.Module):
    """A random model that also gives out what it has on the way."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = RandomModel(number, 14)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = x * 0.5 + 1
        found = self.inner(first, first.flip(0))
        return (*found, first)


# Models that eager itself can train.
NUMBERS = (2, 3, 4, 5, 6, 10, 13, 25, *range(15, 25), 92, 108)


@pytest.mark.parametrize("number", NUMBERS)
def test_e8_random_writes(number: int, device: torch.device) -> None:
    """Eager's gradients, eager's error, or a refusal by name where eager goes on."""

    def make() -> nn.Module:
        return OneInput(number)

    expected = outcome(make, random_write(number), None, device)
    for schedule in SCHEDULES:
        got = outcome(make, random_write(number), schedule, device)
        if isinstance(got, str) and got.startswith("ChangedInPlace"):
            continue
        assert isinstance(got, str) == isinstance(expected, str), (schedule, expected, got)
        if not isinstance(expected, str) and not isinstance(got, str):
            assert_same(expected, got)
