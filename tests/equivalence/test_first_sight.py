"""Plans made when a call is first seen: without a sample, for several shapes, a bounded number."""

import copy
import logging
import types
import warnings

import pytest
import torch
from support.compare import assert_same, seed, train
from support.manage import example_of
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn

import rekindle
from rekindle.errors import PlanMismatch

CPU = torch.device("cpu")


def make(batches: tuple[int, ...] = (8,)) -> Example:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
    return example_of(model, lambda step: gaussian(step, CPU, batches[step % len(batches)], 16))


def lazily(model: nn.Module, **options) -> nn.Module:
    return rekindle.rematerialize(
        model, **{"schedule": SCHEDULES["thrice"], "profile": "estimate", **options}
    )


@pytest.mark.parametrize("on_miss", ["eager", "replan", "raise"])
def test_without_a_sample_the_first_call_is_planned(on_miss: str, caplog) -> None:
    example = make()
    managed = lazily(example.model, on_miss=on_miss)
    assert managed.plan is None
    assert managed.plans == ()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        managed(gaussian(0, CPU, 3, 16))  # no gradients: not what is to be planned
    assert managed.plan is None
    seed(0)
    assert_same(train(make()), train(example, managed))
    assert len(managed.plans) == 1
    assert max(managed.plan.runner.schedule.ops.count(i) for i in range(3)) == 3
    assert "planned call 1 of at most 8 (8x16): peak" in caplog.text


def test_a_budget_is_needed() -> None:
    with pytest.raises(TypeError, match="give budget="):
        rekindle.rematerialize(make().model)
    with pytest.raises(ValueError, match="max_plans"):
        lazily(make().model, max_plans=0)


def test_a_plan_for_each_shape_and_a_bound_on_them(caplog) -> None:
    batches = (8, 5, 4, 3, 8, 5)
    example = make(batches)
    managed = lazily(example.model, on_miss="replan", max_plans=3)
    expected = train(make(batches), steps=6)
    assert_same(expected, train(example, managed, steps=6))
    assert len(managed.plans) == 3
    assert managed.plan is managed.plans[0]
    lines = [r.getMessage() for r in caplog.records if r.name == "rekindle"]
    assert sum("planned call" in line for line in lines) == 5  # 8, 5, 4, 3, and 5 again
    assert sum("more than 3 call signatures" in line for line in lines) == 1
    own = [record for record in caplog.records if record.name == "rekindle"]
    assert all(record.levelno >= logging.WARNING for record in own)


def test_calls_without_gradients_stay_eager_where_training_is_planned() -> None:
    example = make()
    managed = lazily(example.model, on_miss="replan")
    managed(gaussian(0, CPU, 8, 16)).sum().backward()
    managed.eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        got = managed(gaussian(0, CPU, 8, 16))
        assert torch.equal(got, make().model.eval()(gaussian(0, CPU, 8, 16)))
    assert len(managed.plans) == 1


def test_other_shapes_are_eager_or_refused_as_asked() -> None:
    for on_miss, expectation in (
        ("eager", pytest.warns(UserWarning, match="eager")),
        ("raise", pytest.raises(PlanMismatch)),
    ):
        managed = lazily(make().model, on_miss=on_miss)
        managed(gaussian(0, CPU, 8, 16))
        with expectation:
            managed(gaussian(0, CPU, 5, 16))


def test_a_fraction_gives_a_smaller_batch_no_less_than_the_first() -> None:
    """A small last batch is mostly gradients of parameters, of which no fraction can be saved."""

    def build() -> Example:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
        return example_of(
            nn.Sequential(*layers), lambda step: gaussian(step, CPU, (256, 2, 512)[step], 16)
        )

    example = build()
    options = {"profile": "estimate", "time_limit_s": 2, "on_miss": "replan"}
    managed = rekindle.rematerialize(example.model, budget=0.8, **options)
    assert_same(train(build()), train(example, managed))
    first, small, large = managed.plans
    assert small.budget_bytes == first.budget_bytes
    assert small.keep_all_peak_bytes < first.budget_bytes < large.budget_bytes
    assert large.budget_bytes < large.keep_all_peak_bytes


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def patched() -> nn.Module:
    """A model whose forward was replaced on the object, as Accelerate does for autocast."""
    torch.manual_seed(0)
    model = Doubles()
    inner = model.forward.__func__

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return inner(self, x).sin() * 2

    model.forward = types.MethodType(forward, model)
    return model


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("sample", [False, True])
def test_a_forward_of_the_objects_own(inplace: bool, sample: bool) -> None:
    """What the object says is what is planned, not what its class says; and the plan runs."""
    x = gaussian(0, CPU, 8, 16)
    expected = patched()
    out = expected(x)
    out.sum().backward()
    model = patched()
    options = {"args": (x,)} if sample else {}
    managed = lazily(model, on_miss="raise", inplace=inplace, **options)
    assert (managed is model) is inplace
    got = managed(x)
    assert "_Outputs" in got.grad_fn.name()
    got.sum().backward()
    assert torch.equal(got, out)
    for mine, theirs in zip(managed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    copied = copy.deepcopy(managed)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(x).any()
    assert torch.equal(managed(x), out)


@pytest.mark.parametrize("sample", [False, True])
def test_a_forward_patched_after_managing(sample: bool) -> None:
    x = gaussian(0, CPU, 8, 16)
    torch.manual_seed(0)
    model = Doubles()
    options = {"args": (x,)} if sample else {}
    lazily(model, on_miss="raise", inplace=True, **options)
    managed_forward = model.forward.__func__

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return managed_forward(self, x).sin() * 2

    model.forward = types.MethodType(forward, model)
    assert torch.equal(model(x), patched()(x))
    assert model.plan is not None


def test_a_model_with_attributes_of_those_names() -> None:
    """`plan` and `plans` tell of the managed module, unless the model has its own."""

    class Planner(nn.Module):
        plans = ("a", "b")

        def __init__(self) -> None:
            super().__init__()
            self.plan = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.plan(x).tanh() * len(self.plans)

    torch.manual_seed(0)
    model = Planner()
    x = gaussian(0, CPU, 8, 16)
    managed = lazily(model, on_miss="raise")
    assert torch.equal(managed(x), model(x))
    assert managed.plan is model.plan
    assert managed.plans == ("a", "b")
