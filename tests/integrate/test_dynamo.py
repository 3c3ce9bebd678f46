"""`torch.compile(backend="rekindle")`: eager's numbers, within the budget, found by name."""

import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from support.compare import assert_same, train
from support.manage import example_of
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn

from rekindle.errors import BudgetInfeasible, WishRefused
from rekindle.integrate import dynamo
from rekindle.integrate.adapter_options import BadOption
from rekindle.integrate.dynamo import backend

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
# Dynamo itself looks at `.grad` of what one graph hands to the next.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    dynamo._warned.clear()
    yield
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1))
            for _ in range(4)
        ]
        self.layers = nn.ModuleList(layers)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.layers[3](self.layers[2](x))


def make(breaks: bool = False, batches: tuple[int, ...] = (32,)) -> Example:
    torch.manual_seed(0)
    return example_of(
        Net(breaks=breaks),
        lambda step: gaussian(step, CPU, batches[step % len(batches)], 16),
    )


def compiled(example: Example, **options) -> nn.Module:
    """In place, so that the names of the state stay."""
    options = {"profile": "estimate", "time_limit_s": 2, **options}
    example.model.compile(backend=backend, options=options)
    return example.model


@pytest.mark.parametrize("schedule", ["keep-all", "thrice"])
def test_it_trains_as_eager_does(schedule: str) -> None:
    example = make()
    call = compiled(example, schedule=SCHEDULES[schedule])
    assert_same(train(make()), train(example, call))


def test_within_a_budget() -> None:
    seen = []

    def spy(graph, inputs, **given):
        made = backend(graph, inputs, **given)
        seen.append(made)
        return made

    example = make(batches=(256,))
    options = {"profile": "estimate", "time_limit_s": 2, "budget": 0.8}
    example.model.compile(backend=spy, options=options, fullgraph=True)
    assert_same(train(make(batches=(256,))), train(example))
    (only,) = seen
    plan = only.managed.plan
    assert plan.peak_bytes <= plan.budget_bytes < plan.keep_all_peak_bytes
    with pytest.raises(Exception, match="smallest found") as refusal:
        compiled(make(), budget="100B")(gaussian(0, CPU, 32, 16))
    assert isinstance(refusal.value, BudgetInfeasible) or "BudgetInfeasible" in str(refusal.value)


def test_other_shapes_and_eval() -> None:
    batches = (32, 8, 16)
    example = make(batches=batches)
    call = compiled(example, schedule=SCHEDULES["thrice"])
    assert_same(train(make(batches=batches)), train(example, call))
    plain = make(batches=batches)
    train(plain)
    plain.model.eval()
    call.eval()
    x = gaussian(5, CPU, 32, 16)
    with torch.no_grad():
        assert torch.equal(call(x), plain.model(x))


def test_graph_breaks_give_each_graph_a_plan_and_are_told(caplog) -> None:
    example = make(breaks=True)
    call = compiled(example, schedule=SCHEDULES["thrice"])
    with caplog.at_level(logging.WARNING, logger="rekindle"):
        assert_same(train(make(breaks=True)), train(example, call))
    assert "the budget holds for each graph alone" in caplog.text
    assert caplog.text.count("planned call 1 of") == 2


def test_a_graph_without_gradients_runs_as_it_is() -> None:
    @torch.compile(backend=backend, options={"budget": 1.0})
    def positions(x: Tensor) -> Tensor:
        return torch.arange(8) + x.argmax()

    x = torch.ones(4, requires_grad=True)
    assert torch.equal(positions(x), torch.arange(8))
    assert torch.equal(positions(x.detach()), torch.arange(8))


def test_bad_options_are_refused_by_name() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    with pytest.raises(BadOption, match="needs a budget"):
        backend(graph, [])
    with pytest.raises(BadOption, match="no option 'bugdet'; it knows budget"):
        backend(graph, [], options={"bugdet": 1})
    with pytest.raises(BadOption, match="no option 'loss_fn'"):
        backend(graph, [], options={"budget": 1, "loss_fn": print})
    with pytest.raises(WishRefused):
        backend(graph, [], options={"budget": 1, "save": [""]})


SCRIPT = """
import sys, torch
from torch import nn
assert "rekindle" not in sys.modules
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)])
plain = torch.nn.Sequential(*model)
compiled = torch.compile(model, backend="rekindle", options={"budget": 0.9, "profile": "estimate",
                                                            "time_limit_s": 2})
x = torch.randn(64, 8)
compiled(x).square().sum().backward()
mine = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
plain(x).square().sum().backward()
assert all(torch.equal(a, p.grad) for a, p in zip(mine, model.parameters()))
assert "rekindle.integrate.dynamo" in sys.modules
model.compile(backend="rekindle", options={"budget": 0.9, "profile": "estimate", "time_limit_s": 2})
assert list(model.state_dict()) == list(plain.state_dict())
model(x).sum().backward()
print("found by name")
"""


def test_torch_finds_the_backend_by_its_entry_point(tmp_path: Path) -> None:
    """As after `pip install`: the package's metadata on the path, nothing imported beforehand."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = project["entry-points"]["torch_dynamo_backends"]
    info = tmp_path / "rekindle-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rekindle\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in entries.items())
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{lines}")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "found by name"
