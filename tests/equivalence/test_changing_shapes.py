"""Calls whose sizes change: one family of plans, bitwise identical to eager at every size, never
above the budget, and found where eager takes another way."""

import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rekindle
from rekindle.families import Family
from rekindle.runtime.managed_module import KEY, MissedPlanWarning
from rekindle.runtime.plan_table import FamilyEntry

Calls = Sequence[tuple[torch.Tensor, ...]]


class Network(nn.Module):
    """A function over some modules."""

    def __init__(self, function: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def layers(*sizes: int) -> nn.Sequential:
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(*[m for a, b in pairs for m in (nn.Linear(a, b), nn.GELU())])


def language_model() -> nn.Module:
    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        hidden = self.words(ids) + self.places(torch.arange(length))
        mask = torch.full((length, length), float("-inf")).triu(1)
        q, k, v = self.query(hidden), self.key(hidden), self.value(hidden)
        hidden = hidden + self.drop(torch.softmax(q @ k.transpose(1, 2) / 4 + mask, -1)) @ v
        logits = self.net(hidden) @ self.words.weight.t()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return Network(
        forward,
        **{name: nn.Linear(16, 16) for name in ("query", "key", "value")},
        words=nn.Embedding(50, 16),
        places=nn.Embedding(64, 16),
        drop=nn.Dropout(0.1),
        net=layers(16, 32, 16),
    )


def tokens(*lengths: int) -> Calls:
    return [(torch.randint(50, (4, length)),) for length in lengths]


def rows(*lengths: int) -> Calls:
    return [(torch.randn(4, length, 16),) for length in lengths]


def managed_of(model: nn.Module, first: tuple[Any, ...], **options: Any) -> nn.Module:
    given = {"budget": 0.9, "profile": "estimate", "cache": False, "time_limit_s": 0.5}
    given |= {"dynamic": True, **options}
    return rekindle.rematerialize(model, first, **given)


def step(model: nn.Module, args: tuple[Any, ...], seed: int) -> list[Any]:
    """The loss, all gradients and buffers, and the random stream."""
    torch.manual_seed(seed)
    model.zero_grad()
    args = tuple(a.detach().clone().requires_grad_(a.requires_grad) for a in args)
    loss = model(*args)
    loss.backward()
    gradients = [p.grad for p in model.parameters()] + [a.grad for a in args]
    return [loss.detach(), *gradients, *model.buffers(), torch.get_rng_state()]


def assert_equal(mine: list[Any], eagers: list[Any]) -> None:
    for a, b in zip(mine, eagers, strict=True):
        same = torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if a is not None else b is None
        assert same


def families_of(model: nn.Module) -> list[Family]:
    entries = model.__dict__[KEY].entries
    return [e.family for e in entries if isinstance(e, FamilyEntry)]


def follow(model: nn.Module, calls: Calls, **options: Any) -> tuple[nn.Module, list[str]]:
    """Steps of the managed model, each compared with eager; and what ran eagerly, and why."""
    reference = copy.deepcopy(model)
    managed = managed_of(model, calls[0], **options)
    missed: list[str] = []
    for i, args in enumerate(calls):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine = step(managed, args, i)
        missed += [str(w.message) for w in caught if issubclass(w.category, MissedPlanWarning)]
        assert_equal(mine, step(reference, args, i))
    for family in families_of(managed):
        family.wait()
    return managed, missed


def test_one_family_for_all_lengths() -> None:
    lengths = (9, 12, 7, 30, 31, 3, 12, 9, 40)
    managed, missed = follow(language_model(), tokens(*lengths), budget=0.8)
    assert missed == []
    [family] = families_of(managed)
    assert set(family.plans) <= {(n,) for n in lengths}
    for sizes, plan in family.plans.items():
        at = family.at(sizes)
        assert plan.budget_bytes == at.budget
        # What is said of a plan is what a plan for that length alone says.
        full = plan.full()
        assert (full.peak_bytes, full.keep_all_peak_bytes) == (
            plan.peak_bytes,
            plan.keep_all_peak_bytes,
        )
        assert at.predictor.peak_bytes(plan.schedule) <= at.budget
    assert managed.plans[-1].explain()


def test_the_problem_of_a_family_is_the_problem_of_a_plan_for_that_shape_alone() -> None:
    model = language_model()
    managed, _ = follow(model, tokens(9, 12), budget=1.0)
    [family] = families_of(managed)
    for length in (5, 17, 33):
        alone = rekindle.plan(
            language_model(), tokens(length)[0], budget=1.0, profile="estimate", cache=False
        )
        mine = family.at((length,)).problem
        assert [op.name for op in mine.ops] == [op.name for op in alone.problem.ops]
        assert [v.size for v in mine.values] == [v.size for v in alone.problem.values]
        numbers = [(op.cost, op.workspace, op.inputs, op.outputs) for op in mine.ops]
        assert numbers == [(o.cost, o.workspace, o.inputs, o.outputs) for o in alone.problem.ops]


@pytest.mark.slow
def test_images_of_several_resolutions_and_batches() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        *(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    whole = Network(lambda self, x: self.net(x).square().mean(), net=model)
    shapes = ((4, 16), (4, 20), (2, 24), (2, 17), (4, 32), (2, 16))
    managed, missed = follow(whole, [(torch.randn(b, 3, r, r),) for b, r in shapes], budget=0.95)
    assert missed == []
    assert len(families_of(managed)) <= 2


@pytest.mark.slow
def test_two_lengths_that_change_apart() -> None:
    def forward(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = self.net(a), self.net(b)
        return (torch.softmax(x @ y.transpose(1, 2), -1) @ y).square().mean()

    lengths = ((6, 6), (8, 9), (5, 12), (7, 7), (12, 5), (9, 9))
    calls = [(*rows(a)[0], *rows(b)[0]) for a, b in lengths]
    managed, missed = follow(Network(forward, net=layers(16, 32, 16)), calls)
    assert missed == []
    assert len(families_of(managed)) == 1


def branches(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.net(x)
    if x.shape[1] > 10:
        hidden = torch.relu(hidden)
    return (hidden * 2 if x.shape[1] % 2 else hidden).mean()


def test_a_branch_on_a_size_ends_the_family() -> None:
    calls = rows(6, 8, 9, 7, 11, 6, 13)
    managed, missed = follow(Network(branches, net=layers(16, 32, 16)), calls)
    assert missed == []
    assert len(families_of(managed)) == 3
    assert not any(a.covers((n,)) for a in families_of(managed) for n in (0, 1))


def crop(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.net(x[:, :8]).mean() + x[:, -3:].sum() * self.scale


def attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = self.packed(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.net(out.transpose(1, 2).flatten(2)).mean()


def head_dimension(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.unsqueeze(1) * self.scale
    return F.scaled_dot_product_attention(x, x, x).square().mean()


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        pytest.param(crop, (6, 7, 8, 12), id="a slice that is, or is not, the whole"),
        pytest.param(attention, (6, 9, 1, 2), id="length 1"),
        pytest.param(branches, (6, 8, 0), id="an empty dimension", marks=pytest.mark.slow),
    ],
)
def test_where_eager_goes_another_way_the_step_is_exact(function: Any, sizes: Any) -> None:
    scale = nn.Parameter(torch.ones(()))
    modules = {"net": layers(16, 32, 16), "scale": scale, "packed": nn.Linear(16, 48)}
    managed, _ = follow(Network(function, **modules), rows(*sizes), budget=1.0)
    assert families_of(managed)


@pytest.mark.slow
def test_a_head_dimension_that_changes() -> None:
    calls = [(torch.randn(2, 8, d),) for d in (8, 16, 12, 7, 64, 1)]
    follow(Network(head_dimension, scale=nn.Parameter(torch.ones(()))), calls, budget=1.0)


def test_an_empty_batch() -> None:
    net = Network(lambda self, x: self.net(x).sum(), net=layers(16, 32, 16))
    calls = [(torch.randn(n, 16),) for n in (4, 6, 0, 8, 1, 3)]
    managed, missed = follow(net, calls, budget=1.0)
    assert len(missed) == 2  # torch makes no symbols of 0 and 1
    assert families_of(managed)


def test_what_python_asks_the_data_is_asked_at_each_size() -> None:
    def forward(self: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.net(x)
        if mask.all():
            hidden = hidden * 2
        return hidden.masked_fill(~mask[..., None], 0).mean()

    calls = []
    for length, padding in ((6, 0), (8, 0), (7, 1), (9, 2), (10, 0), (11, 1)):
        mask = torch.ones(4, length, dtype=torch.bool)
        mask[0, length - padding :] = False
        calls.append((*rows(length)[0], mask))
    managed, missed = follow(Network(forward, net=layers(16, 32, 16)), calls)
    assert missed == []
    assert len(families_of(managed)) == 2


def outputs(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.net(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda out: out.sum(), id="expanded"),
        pytest.param(
            lambda out: (out.transpose(1, 2) @ torch.ones(out.shape[1], 3)).sum(), id="transposed"
        ),
        pytest.param(lambda out: out[:, ::2].square().mean(), id="of a part"),
    ],
)
def test_gradients_arrive_in_any_layout(loss: Callable[..., torch.Tensor]) -> None:
    model = Network(outputs, net=layers(16, 32, 16))
    reference, calls = copy.deepcopy(model), rows(6, 9, 12, 7, 5)
    managed = managed_of(model, calls[0], budget=1.0)
    for (x,) in calls:
        for each in (managed, reference):
            each.zero_grad()
            loss(each(x)).backward()
        pairs = zip(managed.parameters(), reference.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert families_of(managed)


@pytest.mark.slow
def test_accumulation_and_two_forwards_before_a_backward() -> None:
    model = language_model().eval()
    reference, calls = copy.deepcopy(model), tokens(9, 12, 7, 20, 15)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MissedPlanWarning)
        managed = managed_of(model, calls[0], budget=0.9)
        for each in (managed, reference):
            each.zero_grad()
            for (ids,) in calls:
                each(ids).backward()
            one, other = each(calls[3][0]), each(calls[1][0])
            one.backward()
            other.backward()
    pairs = zip(managed.parameters(), reference.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.slow
def test_a_copy_shares_the_family() -> None:
    managed, _ = follow(Network(branches, net=layers(16, 32, 16)), rows(6, 8))
    other = copy.deepcopy(managed)
    assert families_of(other) == families_of(managed)
    x = rows(4)[0]
    assert_equal(step(other, x, 1), step(managed, x, 1))


@pytest.mark.slow
def test_an_argument_that_requires_grad() -> None:
    calls = [(torch.randn(n, 16, requires_grad=True),) for n in (4, 6, 8, 3)]
    net = Network(lambda self, x: self.net(x).sum(), net=layers(16, 32, 16))
    managed, missed = follow(net, calls, budget=1.0)
    assert missed == []
    assert len(families_of(managed)) == 1


# ---- options


def test_a_range_that_was_said_is_where_the_family_ends() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(16, 32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).mean()

    managed = managed_of(Named(), rows(6)[0], budget=1.0, dynamic={"x": {0: (2, 8), 1: (2, 10)}})
    managed(*rows(8)[0]).backward()
    [family] = families_of(managed)
    assert family.covers((4, 10))
    assert family.covers((8, 2))
    assert not family.covers((4, 11))
    assert not family.covers((9, 10))
    family.wait()
    with pytest.raises(ValueError, match="forward has the arguments x"):
        managed_of(Named(), rows(6)[0], dynamic={"y": {1: (2, 10)}})


def test_without_families_another_shape_is_missed() -> None:
    model = Network(branches, net=layers(16, 32, 16))
    managed, missed = follow(model, rows(6, 8), dynamic=False)
    assert not families_of(managed)
    assert len(missed) == 1


@pytest.mark.slow
def test_what_cannot_change_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    net = Network(lambda self, x: self.rnn(x)[0].mean(), rnn=nn.LSTM(16, 16, batch_first=True))
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        managed, missed = follow(net, rows(6, 8, 10), budget=1.0)
    assert not families_of(managed)
    assert missed
    assert "each shape is planned alone: torch cannot follow them" in caplog.text


@pytest.mark.slow
def test_sizes_for_which_nothing_fits_run_eagerly_or_raise() -> None:
    model = language_model()
    managed, missed = follow(model, tokens(9, 12, 60, 60), budget="60KiB")
    assert families_of(managed)
    assert any("exceeds the budget" in text for text in missed)
    managed = managed_of(model, tokens(9)[0], budget="60KiB", on_miss="raise")
    managed(*tokens(12)[0]).backward()
    with pytest.raises(rekindle.BudgetInfeasible):
        managed(*tokens(60)[0])


@pytest.mark.slow
def test_a_larger_shape_gets_a_better_schedule_in_the_background() -> None:
    managed, _ = follow(language_model(), tokens(9, 12), budget="60KiB")
    [family] = families_of(managed)
    plan = family.plan_at((24,))
    family.wait()
    better = family.plan_at((24,))
    assert better.cost_ns <= plan.cost_ns
    assert better.peak_bytes <= better.budget_bytes
    # Fewer sizes: what fits the larger fits the smaller, so recomputing more is never needed.
    for length in range(4, 24):
        assert family.plan_at((length,)).overhead <= better.overhead + 0.02
