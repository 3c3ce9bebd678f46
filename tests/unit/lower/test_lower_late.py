"""A plan is lowered when it is first called, once, and planning leaves nothing behind."""

import gc
import threading

import pytest
import torch
from torch import fx, nn
from torch.fx.graph_module import _loader
from torch.utils._python_dispatch import TorchDispatchMode

import rekindle
from rekindle.errors import CaptureError
from rekindle.runtime import lazy_runner
from rekindle.runtime.lazy_runner import LateRunner


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))


@pytest.fixture
def made(monkeypatch):
    """Every runner that is made."""
    found = []

    class Counted(lazy_runner.Runner):
        def __init__(self, *args):
            found.append(self)
            super().__init__(*args)

    monkeypatch.setattr(lazy_runner, "Runner", Counted)
    return found


def test_planning_does_not_lower(made):
    x = torch.randn(4, 8)
    plan = rekindle.plan(model(), (x,), budget=1.0, profile="estimate")
    plan.explain()
    plan.predict()
    assert not made
    assert not plan.late_runner.is_made


def test_lowered_once_at_the_first_call(made):
    x = torch.randn(4, 8)
    managed = rekindle.rematerialize(model(), (x,), budget=1.0, profile="estimate")
    assert not made
    managed(x).square().sum().backward()
    managed(x).square().sum().backward()
    assert len(made) == 1
    assert managed.plan.runner is made[0]


def test_one_runner_for_all_threads(made):
    plan = rekindle.plan(model(), (torch.randn(4, 8),), budget=1.0, profile="estimate")
    barrier = threading.Barrier(4)
    found = []

    def ask():
        barrier.wait()
        found.append(plan.runner)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [made[0]] * 4


def test_what_no_call_could_check_is_refused_at_planning():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x) if torch.rand(()) < 0.5 else x + self.inner(x)

    with pytest.raises(CaptureError, match="depends on a random number"):
        rekindle.plan(Draws(), (torch.randn(2, 4),), budget=1.0, profile="estimate")


def test_modes_around_the_first_call_see_the_step_alone():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls.append(str(func))
            out = func(*args, **(kwargs or {}))
            assert not isinstance(out, torch.Tensor) or out.device.type == "cpu"
            return out

    x = torch.randn(4, 8)
    managed = rekindle.rematerialize(model(), (x,), budget=1.0, profile="estimate")
    steps = []
    for _ in range(2):
        with Seen() as seen:
            managed(x).square().sum().backward()
        managed.zero_grad()
        steps.append(seen.calls)
    assert steps[0] == steps[1]
    with Seen() as seen:
        managed(x).sum().backward()  # an expanded gradient, for which code is made in the backward


def test_a_runner_asked_for_inside_inference_mode_trains_afterwards():
    x = torch.randn(4, 8)
    plain = model().eval()
    managed = rekindle.rematerialize(plain, (x,), budget=1.0, profile="estimate")
    with torch.inference_mode():
        _ = managed.plan.runner
    assert rekindle.verify(plain, managed, (x,)).equal


def test_planning_again_and_again_leaves_nothing_behind():
    """No graph, no code of plans that are gone; and what was recorded of a model goes with it."""
    x = torch.randn(4, 8)
    plain = model()

    def left():
        gc.collect()
        nodes = sum(type(o) in (fx.Node, LateRunner) for o in gc.get_objects())
        return nodes, len(_loader.eval_cache)

    def plan_it(plain):
        managed = rekindle.rematerialize(plain, (x,), budget=1.0, profile="estimate")
        managed(x).square().sum().backward()

    nodes_before, _ = left()
    plan_it(plain)
    before = left()
    for _ in range(3):
        plan_it(plain)
    assert left() == before
    del plain
    assert left()[0] == nodes_before
