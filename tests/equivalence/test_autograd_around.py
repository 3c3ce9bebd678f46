"""What else autograd does around a managed call: transforms, forward-mode AD, anomaly mode, hooks
and retained gradients, views of arguments; and which line of the model an error names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import Record, assert_same, keep, seed
from support.manage import example_of, manage
from support.recording import capture
from support.schedules import SCHEDULES
from support.zoo import gaussian
from torch import Tensor, nn
from torch.autograd import forward_ad

import rekindle
from rekindle.capture.node_facts import facts
from rekindle.errors import CaptureError, PlanMismatch
from rekindle.runtime.managed_module import MissedPlanWarning

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)
Step = Callable[[nn.Module, Tensor], list[Tensor | None]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


class ShowsItsArgument(Net):
    def forward(self, x: Tensor) -> Any:
        return self.body(x), x.view(-1), x[2:4], x


class KeepsAnActivation(Net):
    def forward(self, x: Tensor) -> Any:
        self.seen = self.layers[0](x)
        return self.body(self.seen)


class RetainsInside(Net):
    def forward(self, x: Tensor) -> Any:
        h = self.layers[0](x)
        h.retain_grad()
        return self.body(h)


class RetainsOutside(Net):
    def forward(self, x: Tensor) -> Any:
        self.seen = self.layers[0](x)
        self.seen.retain_grad()
        return self.body(self.seen)


class AsksForGradients(Net):
    def forward(self, x: Tensor) -> Any:
        return self.body(x.requires_grad_())


class WritesGradientsIntoItsArgument(Net):
    def forward(self, x: Tensor) -> Any:
        x.mul_(self.layers[0].bias)
        return self.body(x)


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 16, sparse=True), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.table(x.abs().long().clamp(max=9))).tanh()


def run(
    make: type[nn.Module],
    step: Step,
    schedule: str | None,
    device: torch.device,
    requires_grad: bool = False,
    **options: Any,
) -> Record:
    torch.manual_seed(0)
    model = make().to(device)

    def inputs(number: int) -> Tensor:
        return gaussian(number, device, 8, 16, requires_grad=requires_grad)

    call = model if schedule is None else manage(example_of(model, inputs), schedule, **options)
    seed(5)
    x = inputs(0)
    record: Record = {str(i): keep(t) for i, t in enumerate(step(call, x))}
    record["x"] = keep(x.grad)
    return {**record, **{name: keep(p.grad) for name, p in model.named_parameters()}}


def assert_alike(make: type[nn.Module], step: Step, schedule: str, *args: Any) -> None:
    assert_same(run(make, step, None, *args), run(make, step, schedule, *args))


# ---- views of arguments, retained gradients, hooks


@EVERY_SCHEDULE
@pytest.mark.parametrize("requires_grad", [False, True])
def test_e17_outputs_that_are_views_of_arguments(
    requires_grad: bool, schedule: str, device: torch.device
) -> None:
    def all_used(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        first, flat, rows, same = model(x)
        (first.sum() + (flat * 2).sum() + rows.square().sum() + same.sum()).backward()
        return [first, flat, rows, same]

    def only_the_view(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        first, flat, _rows, _same = model(x)
        if flat.requires_grad:
            flat.sum().backward()
        return [first, flat]

    assert_alike(ShowsItsArgument, all_used, schedule, device, requires_grad)
    assert_alike(ShowsItsArgument, only_the_view, schedule, device, requires_grad)


@EVERY_SCHEDULE
def test_e11_retain_grad_on_an_output(schedule: str, device: torch.device) -> None:
    def on_the_last(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        out = model(x)
        out.retain_grad()
        calls = []
        out.register_hook(lambda gradient: calls.append(gradient.clone()) or gradient * 2)
        out.square().sum().backward()
        return [out.grad, *calls]

    def on_an_activation(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        out = model(x)
        model.seen.retain_grad()
        (out.sum() + model.seen.square().sum()).backward()
        return [model.seen.grad]

    assert_alike(Net, on_the_last, schedule, device)
    assert_alike(KeepsAnActivation, on_an_activation, schedule, device)


@EVERY_SCHEDULE
def test_e11_hooks_on_an_output_that_is_read_inside(schedule: str, device: torch.device) -> None:
    """One of the caller's is refused; one that sharded modules set on every output is not."""
    calls = []

    def hook(gradient: Tensor) -> None:
        calls.append(gradient)

    def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        out = model(x)
        model.seen.register_hook(hook)
        out.sum().backward()
        return [out]

    with pytest.raises(PlanMismatch, match="a hook was set on output tensor 1"):
        run(KeepsAnActivation, step, schedule, device)
    hook.__module__ = "torch.distributed.fsdp"
    assert_alike(KeepsAnActivation, step, schedule, device)


def plain_step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    out = model(x)
    out.square().sum().backward()
    return [out]


@EVERY_SCHEDULE
def test_e17_retain_grad_in_forward(schedule: str, device: torch.device) -> None:
    def in_another_layout(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        model(x).backward(torch.ones(16, 8, device=device).t())
        out = model(x)
        out.square().sum().backward()
        return [out]

    assert_alike(RetainsInside, plain_step, schedule, device)
    assert_alike(RetainsInside, in_another_layout, schedule, device)


@EVERY_SCHEDULE
def test_e11_retain_grad_and_requires_grad_in_forward(schedule: str, device: torch.device) -> None:
    def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        out = model(x)
        out.square().sum().backward()
        return [out, x.grad, model.seen.grad if hasattr(model, "seen") else None]

    assert_alike(RetainsOutside, step, schedule, device)
    assert_alike(AsksForGradients, step, schedule, device)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (WritesGradientsIntoItsArgument, r"makes input args\[0\]\[0\] require grad"),
        (SparseTable, r"layout torch.sparse_coo at .*test_autograd_around.py:\d+, .*sparse=False"),
    ],
)
def test_e11_refused_by_name(make: type[nn.Module], what: str, device: torch.device) -> None:
    with pytest.raises(CaptureError, match=what):
        run(make, plain_step, "keep-all", device)


# ---- modes and transforms


@EVERY_SCHEDULE
def test_e17_anomaly_mode(schedule: str, device: torch.device) -> None:
    def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
        with torch.autograd.detect_anomaly():
            return plain_step(model, x)

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        assert_alike(Net, step, schedule, device)


def gradient_of_input(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [torch.func.grad(lambda y: model(y).sum())(x)]


def gradient_of_parameters(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    return list(torch.func.grad(loss)(dict(model.named_parameters())).values())


def mapped(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [torch.func.vmap(model)(torch.stack([x, x + 1]))]


def forward_gradient(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    return list(torch.func.jvp(model, (x,), (torch.ones_like(x),)))


def dual_numbers(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))))


# torch's own, where it first differentiates forwards.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "step", [gradient_of_input, gradient_of_parameters, mapped, forward_gradient, dual_numbers]
)
def test_e11_transforms_run_eagerly_and_say_so(
    step: Step, requires_grad: bool, device: torch.device
) -> None:
    args: Any = (device, requires_grad)
    for on_miss in ("eager", "replan"):
        expected = run(Net, step, None, *args)
        with pytest.warns(MissedPlanWarning, match=r"torch\.func|forward-mode AD"):
            got = run(Net, step, "thrice", *args, on_miss=on_miss)
        assert_same(expected, got)
    with pytest.raises(PlanMismatch, match=r"torch\.func|forward-mode AD"):
        run(Net, step, "thrice", *args)


# ---- E18: whose line it was


class FailsLater(nn.Module):
    """An index that is good when it is planned and bad when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = self.linear(x).tanh()
        return h.index_select(0, index).sin()


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def test_e18_an_error_while_a_plan_runs_names_the_models_line() -> None:
    device = torch.device("cpu")
    good = torch.zeros(8, dtype=torch.int64)
    example = example_of(FailsLater(), lambda step: ((gaussian(step, device, 8, 16), good), {}))
    managed = manage(example, "keep-all")
    with pytest.raises((RuntimeError, IndexError)) as caught:
        managed(gaussian(0, device, 8, 16), good + 99)
    line = line_of("h.index_select(0, index)")
    assert caught.value.__notes__ == [
        f"rekindle: while running what the model does at {__file__}:{line}"
    ]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.nonzero().sum() * gradient


class BackwardAsks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(self.linear(x))


def test_e18_a_refusal_in_the_backward_names_the_models_line(device: torch.device) -> None:
    x = gaussian(0, device, 8, 16)
    with pytest.raises(CaptureError) as caught:
        rekindle.plan(BackwardAsks().to(device), (x,), budget=1.0)
    line = line_of("gradient.nonzero().sum()")
    assert f"at {__file__}:{line}" in str(caught.value)


def test_e18_ops_of_the_backward_know_the_forwards_line(device: torch.device) -> None:
    joint = capture(Net().to(device), (gaussian(0, device, 8, 16),))
    line = f"{__file__}:{line_of('x = torch.tanh(layer(x))')}"
    found = {
        facts(n).where
        for n in joint.nodes
        if n.op == "call_function" and facts(n).phase == "backward"
    }
    assert found == {line}
