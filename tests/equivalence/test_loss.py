"""The loss as a part of the managed call: `managed(x, loss_args=(target,))`."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.schedules import SCHEDULES
from torch import Tensor, nn

import rekindle
from rekindle.runtime.managed_module import MissedPlanWarning


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 10))


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(32, 16), torch.randint(10, (32,))) for _ in range(num)]


def smooth(output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    return F.cross_entropy(output, target, weight, label_smoothing=0.1)


OPTIONS: dict[str, Any] = {"profile": "estimate", "on_miss": "raise", "loss_fn": smooth}


def trained(model: nn.Module, loss: Any) -> list[Tensor]:
    """The losses and gradients of some steps."""
    torch.manual_seed(2)
    found = []
    for x, target in batches(4):
        value = loss(model, x, target)
        value.backward()
        found += [value.detach(), *(p.grad for p in model.parameters())]
        model.zero_grad()
    return found


@pytest.mark.parametrize("schedule", ["keep-all", "thrice"])
def test_e7_each_call_gets_its_own_target(schedule: str) -> None:
    expected = trained(classifier(), lambda model, x, y: smooth(model(x), y))
    x, target = batches(1)[0]
    managed = rekindle.rematerialize(
        classifier(), (x,), loss_args=(target,), schedule=SCHEDULES[schedule], **OPTIONS
    )
    got = trained(managed, lambda model, x, y: model(x, loss_args=(y,)))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_the_loss_is_in_the_plan() -> None:
    """Of wide logits the loss is most of the peak, and the plan has it."""
    model, x = nn.Linear(8, 4096), torch.randn(64, 8)
    target = torch.randint(4096, (64,))
    outside = rekindle.plan(model, (x,), budget=1.0, profile="estimate", hold_outputs=False)
    inside = rekindle.plan(
        model, (x,), budget=1.0, profile="estimate", loss_fn=smooth, loss_args=(target,)
    )
    assert any("log_softmax" in op.name for op in inside.problem.ops)
    assert not any("log_softmax" in op.name for op in outside.problem.ops)
    measured = rekindle.measure(inside.apply(model, (x,), loss_args=(target,)), (x,), {
        "loss_args": (target,)
    })  # fmt: skip
    assert measured.peak_bytes <= inside.predict().peak_bytes


def test_the_first_call_is_planned_with_its_loss_args() -> None:
    x, target = batches(1)[0]
    model = classifier()
    managed = rekindle.rematerialize(model, budget=1.0, **OPTIONS)
    torch.manual_seed(2)
    loss = managed(x, loss_args=(target,))
    torch.manual_seed(2)
    assert torch.equal(loss, smooth(model(x), target))
    assert managed.plan is not None


def test_a_call_that_no_plan_covers_computes_the_loss_too() -> None:
    x, target = batches(1)[0]
    model = classifier().eval()
    options = {**OPTIONS, "on_miss": "eager"}
    managed = rekindle.rematerialize(model, (x,), loss_args=(target,), budget=1.0, **options)
    with pytest.warns(MissedPlanWarning):
        loss = managed(x[:7], loss_args=(target[:7], torch.arange(1.0, 11.0)))
    assert torch.equal(loss, smooth(model(x[:7]), target[:7], torch.arange(1.0, 11.0)))


def test_the_same_model_with_and_without_its_loss() -> None:
    """What was read of a call without the loss is not taken for the call with it."""
    x, target = batches(1)[0]
    model = classifier().eval()
    for loss_fn, shape in ((None, (32, 10)), (smooth, ()), (None, (32, 10))):
        options = {**OPTIONS, "loss_fn": loss_fn}
        kwargs = {} if loss_fn is None else {"loss_args": (target,)}
        managed = rekindle.rematerialize(model, (x,), budget=1.0, **kwargs, **options)
        assert managed(x, **kwargs).shape == shape


def test_verify_hands_the_loss_to_both() -> None:
    x, target = batches(1)[0]
    model = classifier()
    managed = rekindle.rematerialize(model, (x,), loss_args=(target,), budget=1.0, **OPTIONS)
    verdict = rekindle.verify(model, managed, (x,), {"loss_args": (target,)})
    assert verdict, verdict


def test_a_plan_file_is_applied_with_its_loss(tmp_path: Any) -> None:
    x, target = batches(1)[0]
    plan = rekindle.plan(
        classifier(), (x,), budget=1.0, profile="estimate", loss_fn=smooth, loss_args=(target,)
    )
    plan.save(tmp_path / "plan.json")
    loaded = rekindle.Plan.load(tmp_path / "plan.json")
    managed = loaded.apply(classifier(), (x,), loss_fn=smooth, loss_args=(target,))
    assert managed(x, loss_args=(target,)).dim() == 0


class Own(nn.Linear):
    def forward(self, x: Tensor, loss_args: Any = None) -> Tensor:
        return super().forward(x)


def test_what_makes_no_sense_is_refused_by_name() -> None:
    x, target = batches(1)[0]
    plan = rekindle.plan
    with pytest.raises(TypeError, match="without loss_fn"):
        plan(classifier(), (x,), loss_args=(target,), budget=1.0)
    with pytest.raises(TypeError, match=r"expected a tuple, such as loss_args=\(target,\)"):
        plan(classifier(), (x,), loss_fn=smooth, loss_args=target, budget=1.0)
    with pytest.raises(TypeError, match=r"Own.forward has an argument loss_args of its own"):
        plan(Own(16, 10), (x,), loss_fn=smooth, loss_args=(target,), budget=1.0)
    managed = rekindle.rematerialize(classifier(), (x,), loss_args=(target,), budget=1.0, **OPTIONS)
    with pytest.raises(TypeError, match=r"expected a tuple, such as loss_args=\(target,\)"):
        managed(x, loss_args=target)
    with pytest.raises(TypeError, match="without args"):
        rekindle.rematerialize(classifier(), loss_fn=smooth, loss_args=(target,), budget=1.0)
