"""The first steps are watched: where one needs more than its budget, the plan is corrected.

A CPU has no account of its allocator that is free; here `LiveMeter` stands in for a GPU's.
"""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.meter import LiveMeter, resident_of
from torch import Tensor, nn

import rekindle
from rekindle.core import simulate
from rekindle.runtime import step_watch
from rekindle.runtime.step_watch import Excess, StepWatch, with_excess

WIDTH, CLASSES, ROWS = 48, 80, 256


class Account:
    """A `LiveMeter` as the watch sees it."""

    def __init__(self) -> None:
        self.meter = LiveMeter()
        self.num_resets = 0

    def allocated_bytes(self) -> int:
        return self.meter.live

    def peak_bytes(self) -> int:
        return self.meter.peak

    def reset_peak(self) -> None:
        self.num_resets += 1
        self.meter.peak = self.meter.live

    def warm_up(self) -> None:
        pass


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    found = Account()
    monkeypatch.setattr(step_watch, "meter_for", lambda device: found)
    return found


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(8)]
        )
        self.head, self.other = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x)
        return {"logits": self.head(x), "other": self.other(x)}


class One(Two):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)["logits"]


Criterion = Callable[[Any, Tensor], Tensor]
SCALER = torch.amp.GradScaler("cpu", init_scale=8.0)
LOSSES: dict[str, tuple[type[Two], Criterion]] = {
    "cross entropy": (One, F.cross_entropy),
    "mse": (One, lambda out, y: F.mse_loss(out, F.one_hot(y, CLASSES).float())),
    "mean of squares": (One, lambda out, y: out.float().pow(2).mean()),
    "square of a sum": (One, lambda out, y: out.sum().pow(2).mean()),
    "several outputs": (
        Two,
        lambda out, y: F.cross_entropy(out["logits"], y) + out["other"].exp().pow(2).mean(),
    ),
    "grad scaler": (One, lambda out, y: SCALER.scale(F.cross_entropy(out, y))),
    "metrics between": (
        One,
        lambda out, y: F.cross_entropy(out, y) + 0 * out.detach().softmax(1).sort(1)[0].mean(),
    ),
}


def steps(
    model: nn.Module, criterion: Criterion, account: Account, num: int
) -> tuple[list[int], list[Tensor]]:
    """The peak of each step, above what was live before it; and all losses and gradients."""
    torch.manual_seed(1)
    meter, found, peaks = account.meter, [], []
    batches = [(torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,))) for _ in range(num)]
    known = resident_of(model, batches)
    meter._known.update({t.untyped_storage()._cdata: None for t in known})
    with meter:
        for x, y in batches:
            base = meter.peak = meter.live
            loss = criterion(model(x), y)
            loss.backward()
            peaks.append(meter.peak - base)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            with meter.paused():
                found += [t.detach().clone() for t in (loss, *grads)]
            del loss, grads
            model.zero_grad()
    return peaks, found


@pytest.mark.parametrize("name", LOSSES)
def test_b1_b3_the_callers_loss_is_learnt(name: str, account: Account, caplog: Any) -> None:
    """From the fourth step on the peak is within the budget, and every step is eager's."""
    kind, criterion = LOSSES[name]
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(ROWS, WIDTH)
    options: dict[str, Any] = {"profile": "estimate", "time_limit_s": 0.5, "cache": False}
    managed = rekindle.rematerialize(copy.deepcopy(model), (x,), budget=0.6, **options)
    budget = managed.plan.budget_bytes
    with caplog.at_level(logging.WARNING, "rekindle"):
        peaks, got = steps(managed, criterion, account, 6)
    assert max(peaks[3:]) <= budget, peaks
    _, expected = steps(model, criterion, Account(), 6)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    said = [r.getMessage() for r in caplog.records if "a step used" in r.getMessage()]
    assert bool(said) == (max(peaks) > budget)
    assert all("planned again" in line for line in said)
    assert managed.plan.predict().peak_bytes <= budget


def test_b4_all_of_the_peak_is_no_limit(account: Account) -> None:
    """`budget=1.0` asks for a step that computes nothing twice, whatever the loss takes."""
    managed = rekindle.rematerialize(
        One(), (torch.randn(ROWS, WIDTH),), budget=1.0, profile="estimate"
    )
    steps(managed, F.cross_entropy, account, 4)
    assert managed.plan.overhead == 0


@pytest.mark.parametrize("given", [{"budget": "min"}, {"budget": 0.1, "best_effort": True}])
def test_b3_the_smallest_budget_has_room_for_the_callers_loss(
    given: dict[str, Any], account: Account, caplog: Any
) -> None:
    """No budget was given that could be kept: the smallest one is of steps with their loss."""

    def wasteful(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.cat([out] * 9).clone()[:ROWS], y)

    managed = rekindle.rematerialize(
        One(), (torch.randn(ROWS, WIDTH),), profile="estimate", time_limit_s=1, **given
    )
    first = managed.plan.budget_bytes
    peaks, _ = steps(managed, wasteful, account, 6)
    assert max(peaks[:3]) > first
    assert max(peaks[3:]) <= managed.plan.budget_bytes
    said = [r.getMessage() for r in caplog.records if "a step used" in r.getMessage()]
    assert all("planned again for " in line for line in said)


def test_what_cannot_be_kept_is_said_once(account: Account, caplog: Any) -> None:
    def wasteful(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.cat([out] * 9).clone()[:ROWS], y)

    managed = rekindle.rematerialize(
        One(), (torch.randn(ROWS, WIDTH),), budget="600KiB", profile="estimate", time_limit_s=1
    )
    plan = managed.plan
    steps(managed, wasteful, account, 5)
    said = [r.getMessage() for r in caplog.records if "a step used" in r.getMessage()]
    assert len(said) == 1
    assert "what the caller does between forward and backward" in said[0]
    assert "no plan keeps that budget: 600.00 KiB cannot be met" in said[0]
    assert managed.plan is plan


def test_the_watch_ends(account: Account) -> None:
    managed = rekindle.rematerialize(
        One(), (torch.randn(ROWS, WIDTH),), budget="2MiB", profile="estimate", time_limit_s=1
    )
    runner = managed.plan.runner
    assert runner.watch is not None
    steps(managed, F.cross_entropy, account, 5)
    assert runner.watch is None


# ---- out of memory


class Room:
    """How many more calls of `tight` there is room for."""

    left = -1


@torch.library.custom_op("rekindle_test::tight", mutates_args=())
def tight(x: Tensor, is_backward: bool) -> Tensor:
    if Room.left == 0:
        Room.left = -1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    Room.left -= Room.left > 0
    return x * 0.5


@tight.register_fake
def _(x: Tensor, is_backward: bool) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    pass


tight.register_autograd(lambda ctx, g: (tight(g, True), None), setup_context=_setup)


class Tight(nn.Module):
    """Draws random numbers, keeps statistics and a counter, and calls `tight` eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.norm(x)
        for layer in self.layers:
            x = tight(F.dropout(torch.tanh(layer(x)).exp(), 0.2), False)
        return x


def trained(model: nn.Module, rooms: dict[int, int]) -> dict[str, Tensor]:
    """Losses, gradients, buffers and the stream after some steps; `rooms`: in which step, after how
    many calls, there is no room."""
    torch.manual_seed(3)
    found: dict[str, Tensor] = {}
    for step in range(4):
        x = torch.randn(ROWS, WIDTH)
        Room.left = rooms.get(step, -1)
        out = model(x)
        torch.rand(3)  # the caller's own draw, which a repetition must not disturb
        loss = out.square().mean()
        loss.backward()
        found |= {f"{step} {n}": p.grad.clone() for n, p in model.named_parameters()}
        found |= {f"{step} {n}": b.clone() for n, b in model.named_buffers()}
        found |= {f"{step} loss": loss.detach(), f"{step} stream": torch.get_rng_state()}
        model.zero_grad()
    assert Room.left == -1
    return found


@pytest.mark.parametrize("num_calls", [0, 5, 8, 11, 15])
def test_a_step_that_runs_out_of_memory_is_repeated_exactly(
    num_calls: int, account: Account, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward (8 calls) and in the backward, at its begin and where gradients are given."""
    torch.manual_seed(0)
    model = Tight()
    x = torch.randn(ROWS, WIDTH)
    options: dict[str, Any] = {"profile": "estimate", "time_limit_s": 0.5, "cache": False}
    managed = rekindle.rematerialize(copy.deepcopy(model), (x,), budget=0.9, **options)
    first = managed.plan
    monkeypatch.setattr(StepWatch, "room_bytes", lambda watch: int(0.9 * watch.limit_bytes))
    got = trained(managed, {1: num_calls})
    expected = trained(model, {})
    assert [n for n in expected if not torch.equal(expected[n], got[n])] == []
    assert managed.plan.budget_bytes == int(0.9 * first.budget_bytes)
    said = [r.getMessage() for r in caplog.records if "ran out of memory" in r.getMessage()]
    assert len(said) == 1
    assert "is repeated by a plan for" in said[0]


def test_a_backward_after_a_write_is_not_repeated(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward, run again, would meet other data: the error is the user's."""
    x = torch.randn(ROWS, WIDTH)
    managed = rekindle.rematerialize(Tight(), (x,), budget=0.9, profile="estimate", time_limit_s=1)
    monkeypatch.setattr(StepWatch, "room_bytes", lambda watch: int(0.9 * watch.limit_bytes))
    Room.left = 11
    out = managed(x)

    def written(gradient: Tensor) -> None:
        with torch.no_grad():
            managed.layers[0].bias.add_(1)  # eager keeps no bias

    out.register_hook(written)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        out.square().mean().backward()
    assert any("not repeated, since" in note for note in caught.value.__notes__)


def test_calls_that_share_a_plan_get_the_corrected_one(account: Account, caplog: Any) -> None:
    class Counting(One):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            return super().forward(x)

    options: dict[str, Any] = {"profile": "estimate", "time_limit_s": 0.5, "cache": False}
    managed = rekindle.rematerialize(
        Counting(), (torch.randn(ROWS, WIDTH),), budget=0.6, on_miss="raise", **options
    )
    first = managed.plan
    steps(managed, F.cross_entropy, account, 6)
    said = [r.getMessage() for r in caplog.records if "planned again" in r.getMessage()]
    assert said
    assert managed.plans[0] is not first
    twin = copy.deepcopy(managed)
    steps(twin, F.cross_entropy, account, 1)
    assert twin.plans[0] is managed.plans[0]


def test_out_of_memory_later_is_the_users_with_a_hint(account: Account) -> None:
    x = torch.randn(ROWS, WIDTH)
    managed = rekindle.rematerialize(Tight(), (x,), budget=0.9, profile="estimate", time_limit_s=1)
    for room in (3, 11):
        trained(managed, {})
        Room.left = room
        with pytest.raises(torch.OutOfMemoryError) as caught:
            managed(x).square().mean().backward()
        assert any("rekindle: a planned step ran out" in note for note in caught.value.__notes__)


# ---- the watch by itself


class Counters:
    """An allocator that is told what it has."""

    def __init__(self) -> None:
        self.now = self.peak = 100
        self.num_resets = 0

    def goes_to(self, *levels: int) -> None:
        for level in levels:
            self.now = level
            self.peak = max(self.peak, level)

    def allocated_bytes(self) -> int:
        return self.now

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.num_resets += 1
        self.peak = self.now

    def warm_up(self) -> None:
        pass


class Step:
    """Stands for one call."""


def watched(counters: Counters) -> StepWatch:
    return StepWatch([0, 5, 6, 8, 11], 50, counters, 3)


def test_the_section_that_rises_above_the_limit_is_named() -> None:
    counters, step = Counters(), Step()
    watch = watched(counters)
    watch.begin(step)
    for section, levels in enumerate([(140, 130), (160, 135), (155, 120), (170, 110)]):
        counters.goes_to(*levels)
        watch.reached(step, section)
    assert watch.take() == Excess("the backward", 8, 11, 70)
    assert watch.take() is None
    assert watch.num_left == step_watch.NUM_STEPS - 1


def test_an_earlier_peak_hides_nothing() -> None:
    """Peaks of before that would hide the step's are reset; others are left to the user."""
    counters, step = Counters(), Step()
    counters.goes_to(140, 100)
    watch = watched(counters)
    watch.begin(step)
    assert counters.num_resets == 0
    watch.abandon()
    counters.goes_to(1000, 100)
    watch.begin(step)
    assert counters.num_resets == 1
    counters.goes_to(120, 100)
    watch.reached(step, 0)
    assert watch.excess is None


def test_of_two_steps_at_once_neither_is_watched() -> None:
    counters, first, second = Counters(), Step(), Step()
    watch = watched(counters)
    watch.begin(first)
    watch.begin(second)
    counters.goes_to(500)
    for step in (first, second):
        watch.reached(step, 0)
    assert watch.excess is None


def test_what_a_step_had_is_the_room_there_is() -> None:
    counters, step = Counters(), Step()
    watch = watched(counters)
    watch.begin(step)
    counters.goes_to(140)
    assert watch.room_bytes() == 36  # of 40, less what fragmentation may take
    counters.goes_to(1000)
    assert watch.room_bytes() == 45


def test_calls_without_a_backward_end_the_watch() -> None:
    watch = watched(Counters())
    for _ in range(100):
        watch.begin(Step())
    assert watch.is_over


def test_the_problem_gets_what_was_seen() -> None:
    plan = rekindle.plan(One(), (torch.randn(ROWS, WIDTH),), budget=1.0, profile="estimate")
    problem, schedule = plan.problem, plan.schedule
    loss = problem.loss_op
    assert loss is not None
    seen = simulate(problem, schedule).memory[loss] + 12345
    corrected = with_excess(problem, schedule, Excess("", loss, loss + 1, seen))
    assert simulate(corrected, schedule).memory[loss] == seen
    assert corrected.ops[:loss] == problem.ops[:loss]
