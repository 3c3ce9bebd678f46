"""The campaign is trusted only as far as it can fail."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from support.living import campaign
from support.living.campaign import How, judge
from support.living.every import CASES
from torch import nn
from torch._subclasses import FakeTensorMode

from rekindle.errors import CaptureError, PlanMismatch
from rekindle.runtime.managed_module import MissedPlanWarning

CASE = CASES["e4_private_attribute"]
HOW = How("1.0")


class Identity(torch.autograd.Function):
    """Another `grad_fn` than eager's, as of a planned call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def wrapped(model: nn.Module, after: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """The model with something done to its output."""
    original = model.forward
    model.forward = lambda *args, **kwargs: after(original(*args, **kwargs))  # type: ignore[assignment]
    return model


def draws(out: torch.Tensor) -> torch.Tensor:
    numpy.random.rand()  # noqa: NPY002
    return Identity.apply(out)


def raises(out: torch.Tensor) -> torch.Tensor:
    raise KeyError("weight")


def refuses(out: torch.Tensor) -> torch.Tensor:
    raise PlanMismatch("no plan covers this call")


def keeps_a_fake(model: nn.Module) -> nn.Module:
    with FakeTensorMode():
        model.cache = {"table": [torch.ones(2)]}
    return model


def draws_while_planning(model: nn.Module) -> nn.Module:
    torch.rand(1)
    return model


def refuses_to_plan(model: nn.Module) -> nn.Module:
    raise CaptureError("no")


def warns(out: torch.Tensor) -> torch.Tensor:
    warnings.warn("this call runs eagerly", MissedPlanWarning, stacklevel=2)
    return out


FAILURES: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "the least bit": (
        lambda model: wrapped(model, lambda out: Identity.apply(out) * (1 + 1e-6)),
        "different",
    ),
    "a draw": (lambda model: wrapped(model, draws), "different"),
    "another exception": (lambda model: wrapped(model, raises), "crash"),
    "eager in silence": (lambda model: model, "missed without need"),
    "eager without need": (lambda model: wrapped(model, warns), "missed without need"),
    "a mismatch without need": (lambda model: wrapped(model, refuses), "mismatch without need"),
    "a fake tensor": (keeps_a_fake, "fake tensor left"),
    "a draw while planning": (draws_while_planning, "planning moved"),
    "a refusal without need": (refuses_to_plan, "refused without need"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_found(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, kind = FAILURES[how]
    monkeypatch.setattr(campaign, "manage", lambda model, args, kwargs, how: spoil(model))
    outcome = judge(CASE, HOW)
    assert outcome.kind == kind
    assert not outcome.ok


def test_a_change_that_is_missed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def frozen(model: nn.Module, args: Any, kwargs: Any, how: How) -> nn.Module:
        scale = model._scale
        model.middle = lambda h: Identity.apply(h * scale)
        return wrapped(model, Identity.apply)

    monkeypatch.setattr(campaign, "manage", frozen)
    assert judge(CASE, HOW).kind == "different"


def test_a_missing_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(model: nn.Module, args: Any, kwargs: Any, how: How) -> nn.Module:
        return wrapped(model, lambda out: Identity.apply(out).clone())

    monkeypatch.setattr(campaign, "manage", copied)
    assert judge(CASES["e8_saved_output_scaled"], HOW).kind == "missing error"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eager_repeats_itself(name: str) -> None:
    """A case that is not repeatable, or that leaves something behind, would prove nothing."""
    first, second = campaign.live(CASES[name], None), campaign.live(CASES[name], None)
    assert len(first.facts) == len(second.facts) == 4
    for expected, got in zip(first.facts, second.facts, strict=True):
        assert not campaign.differences(expected, got)
