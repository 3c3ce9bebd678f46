"""Batch norm as statistics and dropout as its mask, each with an elementwise op: the same bits,
and a cheap second run.

On a GPU the kernels themselves are compared; elsewhere torch's own ops stand in for them.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.compare import assert_same, train
from support.manage import manage
from support.meter import every_output, measure_step
from support.recording import capture
from support.zoo import Example
from torch import nn

import rekindle
from rekindle.capture.node_facts import NO_STORAGE, facts
from rekindle.core import simulate
from rekindle.rewrite import graph_edit
from rekindle.rewrite.passes import rewrite

fuse = importlib.import_module("rekindle.rewrite.elementwise_fusion")
F = nn.functional


pytestmark = pytest.mark.usefixtures("fuse_anywhere")


class Net(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.first(x)).square().mean()


def in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.middle(F.relu(net.norm(x), inplace=True))


def out_of_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.middle(F.relu(net.norm(x)))


def residual(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As in a ResNet: what was there is added in place, then a ReLU in place."""
    y = net.norm(net.middle(x))
    y += net.other(x)
    return net.middle(F.relu(y, inplace=True))


def residual_sum(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.middle(F.relu(x + net.norm(net.middle(x))))


def sum_then_in_place(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As in a RegNet: a new sum, then a ReLU in place on that."""
    return net.middle(F.relu(x + net.norm(net.middle(x)), inplace=True))


def sum_the_other_way(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net.middle((net.norm(net.middle(x)) + x).relu_())


def sum_of_two(net: Net, x: torch.Tensor) -> torch.Tensor:
    """As in a RegNet's block that changes the size."""
    return net.middle(F.relu(net.other(x) + net.norm(net.middle(x)), inplace=True))


def identity_first(net: Net, x: torch.Tensor) -> torch.Tensor:
    """What is added in place was normed before what it is added to."""
    identity = net.other(x)
    y = net.norm(net.middle(x))
    y += identity
    return net.middle(y.relu_())


def twice(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The same layer two times: its statistics move two times."""
    return net.norm(net.middle(F.relu(net.norm(x)))).relu()


def read_by_others(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.norm(x)
    return net.middle(F.relu(y)) + y.mean()


def read_before(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Read as it was, then written to."""
    y = net.norm(x)
    before = y * 2.0
    return net.middle(y.relu_()) + before


def through_a_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net.norm(x)
    y[:, :2].add_(1.0)
    return net.middle(y.relu_())


def sum_written_through_a_view(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = x + net.norm(net.middle(x))
    y[:, :2].add_(1.0)
    return net.middle(y.relu_())


def added_to_what_is_written(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Nothing is computed from a tensor that changes: the sum is an op of its own."""
    return net.middle(F.relu(net.middle(x).mul_(2.0) + net.norm(x), inplace=True))


SUMS = [residual, residual_sum, sum_then_in_place, sum_the_other_way, sum_of_two, identity_first]
SPLIT = [in_place, out_of_place, *SUMS, twice]
WHOLE = [read_by_others, read_before, through_a_view]
WHOLE += [sum_written_through_a_view, added_to_what_is_written]


def example(function: Callable[..., torch.Tensor], device: torch.device) -> Example:
    torch.manual_seed(0)
    model = Net(function)
    with torch.no_grad():
        for norm in (model.norm, model.other):
            norm.weight.uniform_(-1.5, 1.5)
            norm.bias.uniform_(-1, 1)

    def inputs(step: int) -> tuple[tuple[torch.Tensor, ...], dict]:
        generator = torch.Generator().manual_seed(step)
        return (torch.randn(4, 3, 16, 16, generator=generator).to(device) * 3 + 1,), {}

    return Example(model.to(device).train(), inputs, lambda out: out)


@pytest.mark.parametrize("function", SPLIT + WHOLE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor", "thrice"])
def test_three_steps_equal_eager(
    function: Callable[..., torch.Tensor], schedule: str, device: torch.device
) -> None:
    expected = train(example(function, device))
    again = train(example(function, device))
    mine = example(function, device)
    managed = manage(mine, schedule)
    joined = [op.name for op in managed.plan.problem.ops if "batch_norm_apply" in op.name]
    assert bool(joined) == (function in SPLIT)
    assert None not in fuse._targets.values(), "a kernel is not exact"
    assert not [name for name in joined if not name.startswith("fused_")]
    assert_same(expected, train(mine, managed), again if device.type == "cuda" else None)


@pytest.mark.parametrize("function", SUMS, ids=lambda f: f.__name__)
def test_norms_sum_and_relu_are_one_op(
    function: Callable[..., torch.Tensor], device: torch.device
) -> None:
    ops = manage(example(function, device)).plan.problem.ops
    forward = [op.name for op in ops if op.phase == "forward"]
    assert sum(name.startswith("fused_batch_norm_apply_add_relu_") for name in forward) == 1
    assert not [n for n in forward if n.startswith(("aten.relu", "aten.add.", "rekindle."))]


@pytest.mark.parametrize("function", SPLIT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", ["keep-all", "floor", "thrice"])
def test_without_a_kernel_it_is_put_back(
    function: Callable[..., torch.Tensor],
    schedule: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no kernel is exact, the step is eager's: the same ops, as many bytes."""
    monkeypatch.setattr(fuse, "_prepare", lambda *_: False)
    expected = train(example(function, device))
    again = train(example(function, device)) if device.type == "cuda" else None
    mine = example(function, device)
    managed = manage(mine, schedule)
    problem = managed.plan.problem
    assert not [op.name for op in problem.ops if op.name.startswith(("fused_", "rekindle."))]
    assert_same(expected, train(mine, managed), again)
    if schedule == "keep-all":
        monkeypatch.setattr(graph_edit, "ANYWHERE", False)
        monkeypatch.setattr(graph_edit, "MIN_NUMEL", 1 << 40)
        plain = manage(example(function, device)).plan
        calls = [sum(1 + op.name.count("+") for op in p.ops) for p in (problem, plain.problem)]
        assert calls[0] == calls[1]
        assert simulate(problem, managed.plan.schedule).peak <= (
            simulate(plain.problem, plain.schedule).peak
        )


def test_nobody_reads_what_eager_would(device: torch.device) -> None:
    """The output of batch norm itself dies at once; what is made of the statistics is made by one
    op with all that follows, from the inputs of the norms."""
    managed = manage(example(residual, device))
    problem = managed.plan.problem
    (joined,) = [op for op in problem.ops if "batch_norm_apply" in op.name]
    norms = [op for op in problem.ops if "batch_norm" in op.name and "apply" not in op.name]
    norms = [op for op in norms if "backward" not in op.name]
    assert len(norms) == 2
    read = {v for op in problem.ops for v in op.inputs}
    for norm in norms:
        wide = max(norm.outputs, key=lambda v: problem.values[v].size)
        assert wide not in read
        assert {v for v in norm.outputs if v in joined.inputs}


@pytest.mark.parametrize("function", SPLIT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", ["keep-all", "floor", "thrice"])
def test_memory(function: Callable[..., torch.Tensor], schedule: str, device: torch.device) -> None:
    plain = example(function, device)
    eager = measure_step(plain.model, plain.inputs(0), every_output)
    mine = example(function, device)
    managed = manage(mine, schedule)
    problem = managed.plan.problem
    problem = replace(problem, ops=tuple(replace(op, workspace=0) for op in problem.ops))
    peak = simulate(problem, managed.plan.schedule).peak
    if schedule == "keep-all":
        assert peak <= 1.01 * eager.peak
    if device.type == "cuda":  # elsewhere the stand-in for the kernel has values of its own
        assert measure_step(managed, mine.inputs(0), every_output).peak == peak


class Masked(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(16, 64), nn.Linear(64, 64)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.first(x)).float().square().mean()


def dropped(x: torch.Tensor, p: float) -> torch.Tensor:
    """What dropout is on a GPU, on a CPU too."""
    return torch.native_dropout(x, p, True)[0]


def after_relu(net: Masked, x: torch.Tensor) -> torch.Tensor:
    return net.middle(dropped(F.relu(x), 0.3))


def before_sum(net: Masked, x: torch.Tensor) -> torch.Tensor:
    return net.middle(x + dropped(net.middle(x), 0.3))


def between(net: Masked, x: torch.Tensor) -> torch.Tensor:
    return net.middle(x + dropped(F.gelu(net.middle(x)), 0.3))


def two_of_one(net: Masked, x: torch.Tensor) -> torch.Tensor:
    """Two masks of the same tensor: each its own."""
    y = net.middle(x)
    return net.middle((x + dropped(y, 0.3)) * (x + dropped(y, 0.3)))


def into_a_product(net: Masked, x: torch.Tensor) -> torch.Tensor:
    return net.middle(dropped(net.middle(x), 0.3))


def read_twice(net: Masked, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(x)
    return net.middle(dropped(y, 0.3)) + net.middle(y)


APART = [after_relu, before_sum, between, two_of_one]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("function", [*APART, into_a_product, read_twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor", "thrice"])
def test_dropout(
    function: Callable[..., torch.Tensor], dtype: torch.dtype, schedule: str, device: torch.device
) -> None:
    def made() -> Example:
        torch.manual_seed(0)
        model = Masked(function).to(device, dtype).train()

        def inputs(step: int) -> tuple[tuple[torch.Tensor, ...], dict]:
            generator = torch.Generator().manual_seed(step)
            return (torch.randn(32, 16, generator=generator).to(device, dtype),), {}

        return Example(model, inputs, lambda out: out)

    mine = made()
    managed = manage(mine, schedule)
    ops = managed.plan.problem.ops
    masks = [op for op in ops if "native_dropout.default" in op.name]
    read = {v for op in ops for v in op.inputs}
    unread = [op for op in masks if max(op.outputs, key=_size_in(managed)) not in read]
    assert masks
    exact = device.type == "cuda" or dtype == torch.float32  # the kernel of a CPU rounds twice
    assert len(unread) == (len(masks) if function in APART and exact else 0)
    again = train(made()) if device.type == "cuda" else None
    assert_same(train(made()), train(mine, managed), again)


@pytest.mark.parametrize("function", APART, ids=lambda f: f.__name__)
def test_dropout_without_a_kernel_is_put_back(
    function: Callable[..., torch.Tensor], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuse, "_prepare", lambda *_: False)
    torch.manual_seed(0)
    model = Masked(function).to(device).train()
    x = torch.randn(32, 16, device=device)
    ops = rewrite(capture(model, (x,))).nodes
    products = [n for n in ops if n.target is torch.ops.aten.native_dropout_backward.default]
    assert all(facts(n).phase == "backward" for n in products)
    for dropout in (n for n in ops if n.target is torch.ops.aten.native_dropout.default):
        firsts = [u for u in dropout.users if u.args[1] == 0 and facts(u).storage != NO_STORAGE]
        assert [list(u.users) != [] for u in firsts] == [True]
    managed = rekindle.rematerialize(model, (x,), budget=1.0, profile="estimate")
    assert rekindle.verify(model, managed, (x,)).equal


def _size_in(managed: nn.Module) -> Callable[[int], int]:
    return lambda v: managed.plan.problem.values[v].size
