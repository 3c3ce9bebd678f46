"""A release of torch that nobody has tested is tried on small models, and refused where they differ
from eager."""

import threading

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import rekindle
from rekindle import self_check
from rekindle.capture import graph_follower
from rekindle.errors import RekindleError
from rekindle.self_check import CASES, Case, first_failure, try_untested_torch
from rekindle.supported_torch import ANY_TORCH
from rekindle.torch_compat import running

NEWER = "2.99.0"


@pytest.fixture
def newer_torch(monkeypatch):
    monkeypatch.delenv(ANY_TORCH, raising=False)
    monkeypatch.setattr(self_check, "installed_torch", lambda: NEWER)
    monkeypatch.setattr(self_check, "_passed", set())


def plan():
    return rekindle.plan(nn.Linear(4, 4), (torch.randn(2, 4),), budget=1.0, profile="estimate")


def managed(options, model, args):
    return rekindle.rematerialize(
        model, args, schedule=options.schedule, profile="estimate", on_miss="raise"
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case):
    """Equal to eager, under a schedule that does more than keep everything."""
    plans = []

    def watch(options, model, args):
        made = managed(options, model, args)
        plans.append(made.plan)
        return made

    assert self_check._difference(case, watch) == ""
    assert len(plans[0].schedule.ops) >= len(plans[0].problem.ops) + 2


def test_a1_a_release_that_renamed_what_checkpoint_calls(newer_torch, monkeypatch):
    """As torch 2.14 did: the old name is still there, and nothing calls it; and what Dynamo puts in
    the place of a checkpoint has another name too."""
    monkeypatch.setattr(torch.utils.checkpoint, "_unused", lambda *_: iter(()), raising=False)
    monkeypatch.setattr(running, "_generator_name", lambda: "_unused")
    monkeypatch.setattr(graph_follower, "is_saved_region", lambda _target: False)
    with pytest.raises(RekindleError, match=rf"torch {NEWER} .*self-check fails.*checkpoint: .*"):
        plan()


def test_what_differs_is_said(newer_torch, monkeypatch):
    def differs():
        model = nn.Linear(4, 4)
        model.register_forward_hook(lambda m, _args, out: out * len(type(m).__mro__))
        return model, (torch.randn(2, 4),)

    monkeypatch.setattr(self_check, "CASES", (Case("a wrong one", differs),))
    with pytest.raises(RekindleError, match=r"\(a wrong one: output: \d+ of 8 elements differ.*\)"):
        plan()
    assert not self_check._passed


def test_an_untested_release_is_tried_once(newer_torch, monkeypatch):
    tried = []
    monkeypatch.setattr(self_check, "first_failure", lambda _manage: tried.append(1) or "")
    plan()
    plan()
    assert tried == [1]


def test_a_loaded_plan_is_tried_too(newer_torch, monkeypatch, tmp_path):
    monkeypatch.setattr(self_check, "first_failure", lambda _manage: "")
    plan().save(tmp_path / "plan.json")
    monkeypatch.setattr(self_check, "_passed", set())
    monkeypatch.setattr(self_check, "first_failure", lambda _manage: "a case: it differs")
    loaded = rekindle.Plan.load(tmp_path / "plan.json")
    with pytest.raises(RekindleError, match="a case: it differs"):
        loaded.apply(nn.Linear(4, 4), (torch.randn(2, 4),))


def test_other_threads_wait_for_the_verdict(newer_torch, monkeypatch):
    inside, go_on, order = threading.Event(), threading.Event(), []

    def slow(_manage):
        inside.set()
        go_on.wait()
        order.append("tried")
        return ""

    monkeypatch.setattr(self_check, "first_failure", slow)
    first = threading.Thread(target=try_untested_torch, args=(managed,))
    second = threading.Thread(
        target=lambda: (try_untested_torch(managed), order.append("used")), args=()
    )
    first.start()
    inside.wait()
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert order == ["tried", "used"]


def test_the_user_s_settings_play_no_part(monkeypatch):
    monkeypatch.setattr(self_check, "CASES", CASES[:1])
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"), torch.device("meta"):
        assert first_failure(managed) == ""
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


def test_tested_releases_pay_nothing(monkeypatch):
    monkeypatch.setattr(self_check, "first_failure", lambda _manage: pytest.fail("it was tried"))
    plan()
