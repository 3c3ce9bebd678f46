"""Models in regions: as eager, bitwise, in every step, and within the budget by the live bytes."""

import copy
import gc
import logging
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support import region_models as models
from support.meter import measure_step
from torch import Tensor, nn

import rekindle
from rekindle.errors import BudgetInfeasible, CaptureError
from rekindle.runtime.managed_module import MissedPlanWarning

NUM_STEPS = 4
FAST = ("Printing", "LayerDrop")
SLOW = (
    "EncoderDecoder",
    "UnusedOutputs",
    "ByNumpy",
    "ByData",
    "Looping",
    "Checkpointed",
    "Custom",
    "TwoWays",
)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def loss_of(output: Any) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output


def managed_in_regions(model: nn.Module, args: Any, **options: Any) -> nn.Module:
    options = {"time_limit_s": 0.6, "cache": False, "budget": 0.6} | options
    return rekindle.rematerialize(model, args, **options)


def state_after(model: nn.Module, owner: nn.Module, args: Any, number: int) -> dict[str, Any]:
    """What a step from this seed leaves: `owner` has the parameters of `model`."""
    seed(number)
    owner.zero_grad()
    loss = loss_of(model(*args))
    loss.backward()
    found: dict[str, Any] = {"loss": loss.detach(), "stream": torch.get_rng_state()}
    found |= {f"gradient of {n}": p.grad for n, p in owner.named_parameters()}
    found |= {f"buffer {n}": b.clone() for n, b in owner.named_buffers()}
    found["python"], found["numpy"] = random.random(), np.random.rand()  # noqa: NPY002
    return found


def assert_equal_steps(model: nn.Module, managed: nn.Module, eager: nn.Module, args: Any) -> None:
    for number in range(NUM_STEPS):
        ours = state_after(managed, model, args, number)
        theirs = state_after(eager, eager, args, number)
        different = [
            name
            for name, value in theirs.items()
            if not (
                torch.equal(value, ours[name])
                if isinstance(value, Tensor) and isinstance(ours[name], Tensor)
                else value is ours[name] or (value == ours[name]) is True
            )
        ]
        assert not different, f"step {number}"


def assert_within_budget(model: nn.Module, managed: nn.Module, args: Any) -> None:
    """Over further steps, with other blocks left out: never above the budget, and where a step is
    the planned one, exactly what was planned."""
    plan = managed.plan
    peaks = []
    for number in range(NUM_STEPS, 2 * NUM_STEPS):
        seed(number)
        model.zero_grad()
        # The meter does not count the gradient that the loss begins with.
        peaks.append(measure_step(managed, (args, {}), lambda o: [loss_of(o)]).peak)
    assert max(peaks) <= plan.budget_bytes
    assert max(peaks) <= plan.peak_bytes + 64


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_equal_and_within_budget(name):
    seed(0)
    model = getattr(models, name)()
    args = models.sample()
    eager = copy.deepcopy(model)
    managed = managed_in_regions(model, args)
    assert managed.plan is None  # the first step is recorded
    assert_equal_steps(model, managed, eager, args)
    assert managed.plan.peak_bytes < managed.plan.keep_all_peak_bytes
    if name not in ("Looping", "TwoWays"):  # there another way may be seen for the first time
        assert_within_budget(model, managed, args)
    if name == "Printing":
        assert managed.num_calls == 2 * NUM_STEPS == eager.num_calls + NUM_STEPS
        assert managed.means[: len(eager.means)] == eager.means


@pytest.mark.slow
def test_live_bytes_are_the_simulated_ones():
    seed(0)
    model, args = models.Printing(), models.sample()
    managed = managed_in_regions(model, args, budget=0.5)
    for _ in range(2):
        managed(*args).backward()
    model.zero_grad()
    seen = measure_step(managed, (args, {})).peak
    assert (
        abs(seen - managed.plan.peak_bytes) <= 64
    )  # the 0-dim gradient that the meter begins with


def test_batch_norm_and_an_input_that_requires_grad():
    seed(0)
    model, args = models.LayerDrop(norm="batch"), models.sample(requires_grad=True)
    eager, args_of_eager = copy.deepcopy(model), (args[0].detach().clone().requires_grad_(),)
    managed = managed_in_regions(model, args)
    for number in range(3):
        args[0].grad = args_of_eager[0].grad = None
        ours = state_after(managed, model, args, number)
        theirs = state_after(eager, eager, args_of_eager, number)
        assert all(torch.equal(theirs[n], ours[n]) for n in theirs if n.startswith("buffer"))
        assert torch.equal(args[0].grad, args_of_eager[0].grad)


@pytest.fixture
def no_log_records():
    """pytest keeps them, and those of Dynamo's errors hold the frames of what was read."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_log_records")
def test_nothing_is_left_on_the_model():
    seed(0)
    model, args = models.Printing(), models.sample()
    before = {name: set(m.__dict__) for name, m in model.named_modules()}
    managed = managed_in_regions(model, args)
    given = weakref.ref(args[0])
    for _ in range(2):
        managed(*args).backward()
        assert {name: set(m.__dict__) for name, m in model.named_modules()} == before
    del args
    managed(*models.sample()).backward()
    gc.collect()
    assert given() is None  # no activation or argument of the recorded step is kept
    with torch.no_grad():
        managed(*models.sample())
    managed.eval()
    with pytest.warns(MissedPlanWarning, match="for the first time"):
        managed(*models.sample())


@pytest.mark.slow
def test_an_error_of_the_model_is_its_own():
    class Failing(models.Stack):
        def forward(self, x: Tensor) -> Tensor:
            print("", end="")
            for block in self.blocks:
                x = block(x)
            raise ValueError("the model's own")

    model = Failing(2)
    managed = managed_in_regions(model, models.sample())
    for _ in range(2):
        with pytest.raises(ValueError, match="the model's own"):
            managed(*models.sample())
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_budget_that_cannot_be_met_names_the_smallest():
    seed(0)
    model, args = models.Printing(), models.sample()
    managed = managed_in_regions(model, args, budget=20_000)
    managed(*args).backward()
    with pytest.raises(BudgetInfeasible, match="smallest found") as refusal:
        managed(*args)
    smallest = refusal.value.smallest_peak_bytes
    again = managed_in_regions(model, args, budget=smallest)
    for _ in range(2):
        model.zero_grad()
        again(*args).backward()
    assert again.plan.peak_bytes <= smallest


def test_a_model_without_parts_is_refused():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[x.sum(1) > 0]).sum()

    with pytest.raises(CaptureError, match="depends on the data"):
        rekindle.rematerialize(Small(), (torch.randn(8, 4),), budget=0.5)


def test_explain_names_regions():
    seed(0)
    model, args = models.Printing(), models.sample()
    managed = managed_in_regions(model, args)
    for _ in range(2):
        managed(*args).backward()
    assert "blocks" in managed.plan.explain()
    assert "in regions" in str(managed.plan)
