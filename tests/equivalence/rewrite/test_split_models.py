"""Nothing that was taken apart stands alone: the models of the GPU comparison, small, on a CPU.

The separate ops stand in for the kernels; dropout is the op that it is on a GPU.
"""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.benchmark_scripts import load_script
from support.recording import capture
from support.schedules import SCHEDULES
from torch import fx

import rekindle
from rekindle.capture import JointGraph
from rekindle.program import analyse
from rekindle.rewrite import graph_edit, layer_norm
from rekindle.rewrite.passes import rewrite

fuse = importlib.import_module("rekindle.rewrite.elementwise_fusion")

models = load_script("gpu/models.py")

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _as_on_a_gpu(fuse_anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, _inplace: bool = False):
        return torch.native_dropout(x, p, training)[0] if training and p > 0 else x

    monkeypatch.setattr(graph_edit, "MIN_NUMEL", 513)  # more than channels: those are not wide
    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)


def workload(name: str) -> Any:
    torch.manual_seed(0)
    work = models.MODELS[name]("cpu", True)
    if name.startswith("transformer"):  # as large as what counts
        return replace(work, args=tuple(x.repeat(2, 1, 1) for x in work.args))
    return work


def calls(joint: JointGraph) -> list[fx.Node]:
    """What really runs in the forward."""
    ops = [op for op in analyse(joint).ops if op.phase == "forward"]
    return [node for op in ops for node in op.nodes]


def name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


# Name -> how many ops of which kind there are in place of batch norm's or dropout's own output.
JOINED = {
    "regnet-x-32gf": {"batch_norm_apply_relu": 45, "batch_norm_apply_add_relu": 22},
    "resnet101": {"batch_norm_apply_relu": 9, "batch_norm_apply_add_relu": 8},
    "resnet1001": {"batch_norm_apply_relu": 8},
    "unet": {"batch_norm_apply_relu": 10},
    "transformer-6-6": {"native_dropout_backward_add": 2, "relu_native_dropout_backward": 2},
}


@pytest.mark.parametrize("name", JOINED)
def test_none_is_left_alone(name: str) -> None:
    work = workload(name)
    nodes = calls(rewrite(capture(work.model, work.args, work.kwargs)))
    lone = [n.name for n in nodes if "rekindle.batch_norm_apply" in str(n.target)]
    lone += [n.name for n in nodes if n.target is aten.native_dropout_backward.default]
    assert not lone
    names = [name_of(n) for n in nodes]
    fused = [n[len("fused_") : -len("_01234567")] for n in names if n.startswith("fused_")]
    assert {kind: fused.count(kind) for kind in JOINED[name]} == JOINED[name]


@pytest.mark.parametrize("name", JOINED)
def test_without_kernels_the_ops_are_those_of_eager(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload(name)

    def kinds() -> list[str]:
        nodes = calls(rewrite(capture(work.model, work.args, work.kwargs)))
        return sorted(name_of(n).replace("_.", ".") for n in nodes)

    monkeypatch.setattr(fuse, "_prepare", lambda *_: False)
    monkeypatch.setattr(layer_norm, "_fits", lambda *_: False)
    put_back = kinds()
    monkeypatch.setattr(graph_edit, "ANYWHERE", False)
    assert put_back == kinds()


@pytest.mark.parametrize("name", ["regnet-x-32gf", "transformer-6-6"])
@pytest.mark.parametrize("schedule", ["keep-all", "thrice"])
def test_exact(name: str, schedule: str) -> None:
    work = workload(name)
    managed = rekindle.rematerialize(
        work.model, work.args, work.kwargs, schedule=SCHEDULES[schedule], profile="estimate"
    )
    verdict = rekindle.verify(work.model, managed, work.args, work.kwargs)
    assert verdict.equal, verdict.differences


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["resnet101", "transformer-6-6"])
def test_a_second_backward_is_like_the_first(
    name: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is joined to a forward that was worked on before."""
    monkeypatch.setattr(fuse, "_prepare", lambda *_: exact)
    work = workload(name)
    first = rewrite(capture(work.model, work.args, work.kwargs))
    before = [name_of(n) for n in calls(first)]
    second = rewrite(first.with_tangents(first.tangents), beside=first)
    assert [name_of(n) for n in calls(second)] == before
    assert [name_of(n) for n in calls(first)] == before
