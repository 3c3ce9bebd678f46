"""What a forward leaves behind besides its outputs: set again at each call as in eager, or refused
by name; and nothing of the capture itself."""

import functools

import pytest
import torch
from support.compare import assert_same, train
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn

from rekindle.errors import CaptureError

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)


def example(kind: type[nn.Module], device: torch.device, loss=None) -> Example:
    torch.manual_seed(0)
    inputs = functools.partial(inputs_of, device)
    return example_of(kind().to(device), inputs, loss)


def inputs_of(device: torch.device, step: int) -> Tensor:
    return gaussian(step, device, 8, 16, requires_grad=True)


class ReplacesABuffer(Two):
    """A running mean, replaced instead of written; its old contents take part in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = h * self.mean
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(dim=0)
        return self.second(y.tanh())


@EVERY_SCHEDULE
def test_a_buffer_that_is_replaced(schedule: str, device: torch.device) -> None:
    assert_trains_alike(lambda: example(ReplacesABuffer, device), schedule, device)


class SetsAnAuxiliaryLoss(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.first.balance = h.square().mean()
        self.attention = h.detach().softmax(dim=-1)
        return self.second(h.tanh())


@EVERY_SCHEDULE
def test_tensors_set_as_attributes(schedule: str, device: torch.device) -> None:
    """The caller finds them where eager leaves them, and gradients flow through them."""

    def run(made: Example, call: nn.Module) -> list[Tensor]:
        found = []
        for step in range(3):
            call.zero_grad()
            x = made.inputs(step)[0][0]
            loss = call(x).square().mean() + 0.1 * call.first.balance
            loss.backward()
            found += [loss, x.grad, call.attention, call.first.balance.detach()]
            found += [p.grad.clone() for p in call.parameters()]
        return found

    plain, made = example(SetsAnAuxiliaryLoss, device), example(SetsAnAuxiliaryLoss, device)
    managed = manage(made, schedule)
    assert not hasattr(made.model, "attention"), "capture has left its own"
    expected, got = run(plain, plain.model), run(made, managed)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert type(managed.attention) is Tensor


class GivesDetachedData(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        halved = torch.empty_like(h)
        halved.data = h.detach() * 0.5
        return self.second(h.tanh()) + halved


@EVERY_SCHEDULE
def test_data_given_to_a_tensor(schedule: str, device: torch.device) -> None:
    assert_trains_alike(lambda: example(GivesDetachedData, device), schedule, device)


class ChangesShapesInPlace(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.unsqueeze_(0)
        h.squeeze_(0)
        g = h * 2
        g.t_()
        return self.second(g.t()) + g.t()


@EVERY_SCHEDULE
def test_shapes_changed_in_place(schedule: str, device: torch.device) -> None:
    assert_trains_alike(lambda: example(ChangesShapesInPlace, device), schedule, device)


class Counts(Two):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(x)) * self.calls


class Collects(Two):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.first(x).detach())
        return self.second(x)


class ReplacesAParameter(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.first.weight = nn.Parameter(self.first.weight.detach().clamp(-0.1, 0.1))
        return self.second(self.first(x))


class GivesAParameterOtherData(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = self.first.weight.data.clamp(-0.1, 0.1)
        return self.second(self.first(x))


class ReplacesABufferByNothing(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("once", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * (1 if self.once is None else self.once)
        self.once = None
        return self.second(h)


REPEATED = (Counts, Collects, ReplacesABufferByNothing)


@pytest.mark.filterwarnings(
    "ignore::rekindle.runtime.managed_module.MissedPlanWarning"
)  # a counter is new at each call
@pytest.mark.parametrize("kind", REPEATED, ids=lambda kind: kind.__name__)
def test_what_forward_does_to_its_module_is_repeated(
    kind: type[nn.Module], device: torch.device
) -> None:
    made = example(kind, device)
    managed = manage(made, on_miss="eager")
    fresh = example(kind, device)
    assert_same(train(fresh), train(made, managed))
    if kind is Counts:
        assert managed.calls == fresh.model.calls
    if kind is Collects:
        assert all(map(torch.equal, managed.seen, fresh.model.seen))


REFUSED = {
    ReplacesAParameter: r"Parameter.*test_side_effects",
    GivesAParameterOtherData: r"first\.weight",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_a_plan_cannot_repeat_is_refused_by_name(
    kind: type[nn.Module], device: torch.device
) -> None:
    made = example(kind, device)
    with pytest.raises(CaptureError, match=REFUSED[kind]):
        manage(made)
    fresh = example(kind, device)
    assert_same(train(fresh), train(made))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # an error since torch 2.14
def test_torchscript_is_refused_by_name(device: torch.device) -> None:
    class Scripted(Two):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.inner(x))

    with pytest.raises(CaptureError, match=r"inner.*TorchScript"):
        manage(example(Scripted, device))


@functools.lru_cache
def grid(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.float32, device=device) / size


TABLE: dict[tuple[int, torch.device], Tensor] = {}


def entry(size: int, device: torch.device) -> Tensor:
    if (size, device) not in TABLE:
        TABLE[size, device] = torch.linspace(0, 1, size, device=device)
    return TABLE[size, device]


class LooksUp(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) + grid(16, x.device)
        return self.second(h.tanh() * entry(16, x.device))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("schedule", ["keep-all", "thrice"])
def test_tables_that_python_keeps(schedule: str, warm: bool, device: torch.device) -> None:
    """Functions behind a cache and global tables hold no tensor of the capture afterwards."""
    expected = train(example(LooksUp, device))
    made = example(LooksUp, device)
    if not warm:
        grid.cache_clear()
        TABLE.clear()
    managed = manage(made, schedule)
    assert all(type(t) is Tensor for t in TABLE.values())
    assert type(grid(16, device)) is Tensor
    assert_same(expected, train(made, managed))
    assert_same(expected, train(example(LooksUp, device)))
