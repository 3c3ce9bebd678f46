"""Managed modules that move values to host memory equal eager to the bit, whatever is done to them.

Transfers are put into schedules at random, so that any value may be away at any time, and run on
lanes whose copies happen as late, or as early, as the waits allow (`support.lazy_lanes`).
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import Record, assert_same, train
from support.lazy_lanes import MODES, LazyLanes
from support.manage import manage
from support.moving import OPTIONS, device_file, moving
from support.schedules import SCHEDULES
from support.zoo import CASES, Case
from torch import nn

import rekindle
from rekindle.core import Problem, Schedule, schedule_of
from rekindle.errors import HostMemoryFull, InvalidBudget
from rekindle.runtime import transfers
from rekindle.runtime.host_memory import host_memory

QUICK = ("lora", "experts", "lstm", "fourier")  # each by another schedule, on other lanes


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], LazyLanes]:
    def use(mode: int) -> LazyLanes:
        made = LazyLanes(MODES[mode % len(MODES)])
        monkeypatch.setattr(transfers, "lanes_of", made)
        return made

    return use


def assert_trains_alike(
    case: Case, schedule: str, seed: int, folder: Path, lanes: Callable[[int], LazyLanes]
) -> None:
    expected = train(case.build("cpu"))
    used = lanes(seed)
    example = case.build("cpu")
    given = moving(schedule, seed)
    managed = manage(example, given, device_profile=device_file(folder), **OPTIONS)
    assert_same(expected, train(example, managed))
    assert used.num_copies > 0


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_equal_to_eager(number: int, tmp_path: Path, lanes: Callable[[int], LazyLanes]) -> None:
    case = next(c for c in CASES if c.name == QUICK[number])
    assert_trains_alike(case, list(SCHEDULES)[number], number, tmp_path, lanes)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_model_is_equal_to_eager(
    case: Case, schedule: str, tmp_path: Path, lanes: Callable[[int], LazyLanes]
) -> None:
    for seed in range(4):
        assert_trains_alike(case, schedule, seed, tmp_path, lanes)


# ---- what is done to one model


class Net(nn.Module):
    """Two outputs, dropout, batch norm's statistics, a tied weight and an op in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        h = torch.sin(h).mul_(2.0)
        return self.last(h), (h * h).view(-1, 4).sum(1)


def pair(folder: Path, seed: int = 1, **options: Any) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The model, managed with moves, and the input of both."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net().train())
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(5), requires_grad=True)
    options = {"schedule": moving("sqrt", seed), "on_miss": "raise", **OPTIONS, **options}
    managed = rekindle.rematerialize(
        models[1], (x,), profile="estimate", device_profile=device_file(folder), **options
    )
    assert managed.plan.moved_bytes > 0
    return models[0], managed, x


Use = Callable[[nn.Module, torch.Tensor], Any]


def once(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    a, b = model(x)
    return a.square().mean() + b.sum()


def plainly(model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        once(model, x).backward()  # gradients add up


def two_forwards(model: nn.Module, x: torch.Tensor) -> None:
    first, second = once(model, x), once(model, x * 2)
    second.backward()
    third = once(model, x)
    first.backward()
    third.backward()


def kept_graph(model: nn.Module, x: torch.Tensor) -> None:
    loss = once(model, x)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def one_output_alone(model: nn.Module, x: torch.Tensor) -> None:
    for number in (0, 1, 0):
        model(x)[number].sum().backward()


def other_layout(model: nn.Module, x: torch.Tensor) -> None:
    a, b = model(x)
    weight = torch.arange(48.0).view(8, 6).t()
    torch.autograd.backward([a, b], [weight, torch.ones_like(b)])


def dropped_forward(model: nn.Module, x: torch.Tensor) -> None:
    once(model, x)
    gc.collect()
    once(model, x).backward()


def no_grad_between(model: nn.Module, x: torch.Tensor) -> None:
    loss = once(model, x)
    with torch.no_grad():
        model.eval()
        torch.sin(x)
        model.train()
    loss.backward()


def output_written_to(model: nn.Module, x: torch.Tensor) -> None:
    a, b = model(x)
    loss = a.sum() + b.sum()
    with torch.no_grad():
        a.mul_(3.0)
    loss.backward()


def gradient_of_autograd_grad(model: nn.Module, x: torch.Tensor) -> None:
    for tensor in torch.autograd.grad(once(model, x), [x, *model.parameters()]):
        tensor.zero_()  # a caller may write into what it is given
    once(model, x).backward()


def broken_backward(model: nn.Module, x: torch.Tensor) -> None:
    def fail(_grad: torch.Tensor) -> None:
        raise KeyError("in a hook")

    handle = model.first.bias.register_hook(fail)
    with pytest.raises(KeyError, match="in a hook"):
        once(model, x).backward()
    handle.remove()
    model.zero_grad()
    x.grad = None
    once(model, x).backward()


USES = (
    *(plainly, two_forwards, kept_graph, one_output_alone, other_layout, dropped_forward),
    *(no_grad_between, output_written_to, gradient_of_autograd_grad, broken_backward),
)


def seen(model: nn.Module, x: torch.Tensor, use: Use) -> Record:
    torch.manual_seed(3)
    x.grad = None
    use(model, x)
    tensors = {f"gradient {k}": p.grad for k, p in model.named_parameters()}
    tensors |= dict(model.named_buffers()) | {"input": x.grad, "stream": torch.get_rng_state()}
    return {k: None if t is None else t.detach().clone() for k, t in tensors.items()}


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_whatever_is_done(use: Use, tmp_path: Path, lanes: Callable[[int], LazyLanes]) -> None:
    memory = host_memory(torch.device("cpu"))
    for number in (1, 2):  # either of the two lanes late
        lanes(number)
        eager, managed, x = pair(tmp_path, seed=number + 1)
        expected = seen(eager, x, use)
        assert_same(expected, seen(managed, x, use))
        gc.collect()
        assert memory.leased_bytes == 0, "a step that is over has host memory"


def test_an_error_in_the_forward(tmp_path: Path, lanes: Callable[[int], LazyLanes]) -> None:
    lanes(3)
    eager, managed, x = pair(tmp_path)
    runner = managed.plan.runner
    call, runner.lowered.forward.__globals__["sin"] = runner.lowered.forward, None
    memory = host_memory(torch.device("cpu"))

    def failing(args: list[Any]) -> Any:
        call(list(args))
        raise MemoryError("in the forward")

    object.__setattr__(runner.lowered, "forward", failing)
    with pytest.raises(MemoryError, match="in the forward"):
        once(managed, x)
    assert memory.leased_bytes == 0
    object.__setattr__(runner.lowered, "forward", call)
    torch.manual_seed(0)
    managed.load_state_dict(eager.state_dict())
    assert_same(seen(eager, x, plainly), seen(managed, x, plainly))


def test_two_live_steps_beyond_the_host_budget(tmp_path: Path) -> None:
    _, managed, x = pair(tmp_path)
    num_bytes = managed.plan.runner.lowered.host.num_bytes
    _, managed, x = pair(tmp_path, offload=f"host_budget {num_bytes + 100}B")
    gc.collect()
    first = once(managed, x)
    with pytest.raises(HostMemoryFull, match="run their backward first"):
        once(managed, x)
    first.backward()
    once(managed, x).backward()


def test_what_cannot_be(tmp_path: Path) -> None:
    for wrong in (True, "host", "host_budget", "host_budget 0.5", "host_budget 8", 3, None):
        with pytest.raises(InvalidBudget, match=r"offload|host_budget"):
            rekindle.plan(Net(), (torch.ones(6, 8),), budget=0.5, offload=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidBudget, match="leave one of them out"):
        rekindle.plan(
            Net(), (torch.ones(6, 8),), budget=0.5, offload="host_budget 1GiB", cuda_graph=True
        )


def test_a_plan_file_that_moves_values(tmp_path: Path) -> None:
    eager, managed, x = pair(tmp_path, budget="1GiB")
    managed.plan.save(tmp_path / "plan.json")
    torch.manual_seed(0)
    again = rekindle.Plan.load(tmp_path / "plan.json").apply(Net().train(), (x,))
    again.plan.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()
    assert again.plan.schedule.transfers
    assert_same(seen(eager, x, plainly), seen(again, x, plainly))


# ---- a wait that is missing is found


def reused_at_once(problem: Problem) -> Schedule:
    """Sends one value, fetches it, and gives its place to another before anything has read it."""
    forward = [i for i, op in enumerate(problem.ops) if op.phase == "forward"]
    loss = problem.loss_op
    assert loss is not None
    sizes = [v.size for v in problem.values]
    later = {v for op in problem.ops[loss + 1 :] for v in op.inputs} - set(problem.outputs)
    made = [v for i in forward for v in problem.ops[i].outputs if v in later]
    large = max(sizes[v] for v in made)
    first, second = [v for v in made if sizes[v] == large][:2]
    moves = [("send", first), ("drop", first), ("fetch", first), ("release", first)]
    moves += [("send", second), ("drop", second), ("fetch", second)]
    return schedule_of([*range(loss + 1), *moves, *range(loss + 1, len(problem.ops))])


@pytest.mark.parametrize("waits", [True, False])
def test_host_memory_is_not_reused_before_it_was_read(
    waits: bool,
    tmp_path: Path,
    lanes: Callable[[int], LazyLanes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes(2)  # fetches as late, and sends as early as can be
    if not waits:
        monkeypatch.setattr(transfers.Moves, "release", lambda _self, _slot: None)
    eager, managed, x = pair(tmp_path, schedule=reused_at_once, loss_fn=lambda out: out[0].sum())
    slots = managed.plan.runner.lowered.host.slots
    assert slots[0].offset == slots[1].offset

    def step(model: nn.Module, x: torch.Tensor) -> None:
        (model(x) if model is managed else model(x)[0].sum()).backward()

    expected, got = seen(eager, x, step), seen(managed, x, step)
    if waits:
        assert_same(expected, got)
    else:
        with pytest.raises(AssertionError):
            assert_same(expected, got)
