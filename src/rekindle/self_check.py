"""A release of torch newer than the tested ones is tried before it is used: small models, each
planned with recomputation, must equal eager bitwise on the CPU.

Each case stands for a part of torch that is reached through private names or whose behaviour
Rekindle repeats: what draws random numbers, what writes in place, what other libraries replace.
The cases run once in a process, at the first plan, in a few seconds; a release that was tested
never pays for them.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rekindle.core import Problem, Schedule
from rekindle.plans.options import Options
from rekindle.supported_torch import installed_torch, must_be_tried, refusal, tested
from rekindle.verification import verify

log = logging.getLogger("rekindle")

Manage = Callable[[Options, nn.Module, tuple[Any, ...]], nn.Module]


@dataclass(frozen=True, slots=True)
class Case:
    """A small model that a release must run exactly."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...]]]  # a model and its arguments


class _Forward(nn.Module):  # type: ignore[misc]
    """Two layers and a forward that is given as a function."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _dropout(model: Any, x: Tensor) -> Tensor:
    hidden = F.dropout(F.gelu(model.first(x)), 0.5)
    return F.dropout(model.second(hidden).tanh(), 0.2)


def _region(reentrant: bool) -> Callable[..., Tensor]:
    def forward(model: Any, x: Tensor) -> Tensor:
        for layer in (model.first, model.second):
            region = nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.3))
            x = checkpoint(region, x, use_reentrant=reentrant)
        return x.sin()

    return forward


def _in_place(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x).clone()
    hidden[:, :4].mul_(2.0)
    hidden.view(-1)[::3].add_(1.0)
    return F.relu(model.second(hidden), inplace=True).transpose(0, 1) @ hidden


def _attention(model: Any, x: Tensor) -> Tensor:
    q, k, v = (layer(x).view(2, 2, -1, 4) for layer in (model.first, model.second, model.first))
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)


def _recurrent(model: Any, x: Tensor) -> Tensor:
    out, (state, _) = model.layer(model.first(x).view(4, 2, 8))
    return model.second(out) + state.sum()


def _normed(model: Any, x: Tensor) -> Tensor:
    image = model.norm(model.convolution(model.first(x).view(4, 2, 2, 4)))
    return model.second(F.max_pool2d(image.relu(), 2).flatten(1))


class _Cube(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return 3 * context.saved_tensors[0] ** 2 * gradient


def _own_gradient(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    hidden.register_hook(lambda gradient: gradient * 0.5)
    return model.second(_Cube.apply(hidden))


def _low_precision(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.second(model.first(x).relu()).float().softmax(-1).log()


def _reads_data(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    if x.sum() > 1e6:
        return hidden
    return model.second(hidden.tanh()) * x.abs().max().item()


def _sets_attribute(model: Any, x: Tensor) -> Tensor:
    model.auxiliary = model.first(x).square().mean()
    return model.second(x).tanh() + model.auxiliary


def _reads_type(model: Any, x: Tensor) -> Tensor:
    if type(x) is not Tensor:  # as libraries do; the model's code is read, not run
        raise TypeError(type(x))
    return model.second(model.first(x).tanh())


def _tied(model: Any, x: Tensor) -> Tensor:
    words = x.abs().long().sum(-1) % 8
    return F.cross_entropy(F.linear(model.second(model.table(words)), model.table.weight), words)


def _case(name: str, forward: Callable[..., Tensor], **parts: Callable[[], nn.Module]) -> Case:
    def make() -> tuple[nn.Module, tuple[Any, ...]]:
        made = {name: part() for name, part in parts.items()}
        return _Forward(forward, **made), (torch.randn(8, 8, requires_grad=True),)

    return Case(name, make)


CASES = (
    _case("dropout", _dropout),
    _case("torch.utils.checkpoint", _region(False)),
    _case("torch.utils.checkpoint, reentrant", _region(True)),
    _case("ops in place on views", _in_place),
    _case("attention", _attention),
    _case("a recurrent layer", _recurrent, layer=lambda: nn.LSTM(8, 8, 2, dropout=0.2)),
    _case(
        "batch norm",
        _normed,
        convolution=lambda: nn.Conv2d(2, 4, 3, padding=1),
        norm=lambda: nn.BatchNorm2d(4),
    ),
    _case("autograd.Function and a hook", _own_gradient),
    _case("autocast", _low_precision),
    _case("numbers read from data", _reads_data),
    _case("a tensor set as attribute", _sets_attribute),
    _case("code that Dynamo reads", _reads_type),
    _case("tied weights", _tied, table=lambda: nn.Embedding(8, 8)),
)

_lock = threading.RLock()
_running = False
_passed: set[str] = set()  # releases, in this process


def try_untested_torch(manage: Manage) -> None:
    """Raises RekindleError where torch is newer than the tested releases and a case fails. `manage`
    plans a model for one call."""
    global _running
    installed = installed_torch()
    if not must_be_tried(installed) or installed in _passed:
        return
    with _lock:  # another thread waits for the verdict; the cases' own plans pass
        if _running or installed in _passed:
            return
        _running = True
        try:
            since = time.monotonic()
            problem = first_failure(manage)
        finally:
            _running = False
        if problem:
            raise refusal(installed, f"its self-check fails on this one ({problem})")
        _passed.add(installed)
        log.info(
            "torch %s is newer than the tested releases (%s); the self-check passes: %d small "
            "models are bitwise equal to eager (%.1f s)",
            *(installed, tested(), len(CASES), time.monotonic() - since),
        )


def first_failure(manage: Manage) -> str:
    """The first case that differs from eager and in what, as text; "" where all are equal."""
    for case in CASES:
        try:
            problem = _difference(case, manage)
        except Exception as error:  # whatever it is, this release does not run the case
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if problem:
            return f"{case.name}: {problem}"
    return ""


def _difference(case: Case, manage: Manage) -> str:
    options = Options(schedule=_recomputing, profile="estimate", cache=False, on_miss="raise")
    # The user's settings and random streams play no part, and are left as they are.
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        torch.manual_seed(0)
        model, args = case.make()
        verdict = verify(model, manage(options, model, args), args)
    return "" if verdict else verdict.differences[0]


def _recomputing(problem: Problem) -> Schedule:
    """The forward runs twice, with all of its ops that may, before the backward."""
    num_forward = len(problem.ops) if problem.loss_op is None else problem.loss_op
    again = [i for i in range(num_forward) if not problem.ops[i].once]
    return Schedule((*range(num_forward), *again, *range(num_forward, len(problem.ops))))
