"""The list of passes: each says when it is exact and what sees to it, and one more pass is one more
entry."""

import importlib
import re

import pytest
import torch
from support.compare import assert_same, train
from support.manage import example_of, manage
from support.recording import capture
from torch import nn

from rekindle.capture.node_facts import facts
from rekindle.rewrite import graph_edit, passes
from rekindle.rewrite.passes import PASSES, Pass, rewrite

aten = torch.ops.aten


class Mixer(nn.Module):
    """With an op for most of the passes, if it only ran on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.conv, self.norm = nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(x))
        x = torch.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        scores = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


def recorded():
    torch.manual_seed(0)
    return capture(Mixer(), (torch.randn(2, 4, 8),))


def account(nodes):
    return [
        (n.name, str(n.target), str(n.args), str(n.kwargs), facts(n).storage_bytes) for n in nodes
    ]


def test_each_names_what_sees_to_its_exactness():
    for each in PASSES:
        text = each.exact
        if same := re.match(r"As for `(\w+)`\.", text):
            [text] = [p.exact for p in PASSES if p.name == same[1]]
        named = re.findall(r"`(\w+)\.(\w+)`", text)
        assert named, each.name
        for module, name in named:
            room = importlib.import_module(f"rekindle.rewrite.{module}")
            assert callable(getattr(room, name)), (each.name, module, name)


def test_names_and_order():
    names = [each.name for each in PASSES]
    assert len(set(names)) == len(names)
    parts = [("forward", "backward", "step").index(each.part) for each in PASSES]
    assert parts == sorted(parts)


def test_what_was_recorded_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graph_edit, "MIN_NUMEL", 1)
    monkeypatch.setattr(graph_edit, "ANYWHERE", True)
    joint = recorded()
    before = account(joint.nodes)
    made = rewrite(joint)
    assert account(joint.nodes) == before
    assert made.recorded is joint
    assert not set(made.nodes) & set(joint.nodes)
    assert account(made.nodes) != before  # it did something


def test_passes_for_cuda_change_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graph_edit, "MIN_NUMEL", 1)
    joint = recorded()
    all_of_them = account(rewrite(joint).nodes)
    monkeypatch.setattr(passes, "PASSES", tuple(p for p in PASSES if not p.cuda))
    assert account(rewrite(joint).nodes) == all_of_them
    monkeypatch.setattr(passes, "PASSES", ())
    assert account(rewrite(joint).nodes) == account(joint.nodes) != all_of_them


def test_without_fuse_no_pass_with_kernels_runs(monkeypatch: pytest.MonkeyPatch):
    ran = []
    spies = [
        Pass(f"{part} {fuses}", part, lambda _, p=part, f=fuses: ran.append((p, f)), "", "",
             fuses=fuses)
        for part in ("forward", "backward", "step") for fuses in (False, True)
    ]  # fmt: skip
    monkeypatch.setattr(passes, "PASSES", tuple(spies))
    joint = recorded()
    rewrite(joint, fuse=False)
    assert ran == [("forward", False), ("backward", False), ("step", False)]
    ran.clear()
    rewrite(joint)
    assert [part for part, _ in ran] == sorted(
        (part for part, _ in ran), key=["forward", "backward", "step"].index
    )
    assert len(ran) == 6


def test_a_new_pass_is_one_more_entry(monkeypatch: pytest.MonkeyPatch):
    """A number negated twice is the number: the first of the two is read no more."""

    def without_double_negation(edit: graph_edit.GraphEdit) -> None:
        for node in edit.nodes:
            if node.target is aten.add.Tensor:
                node.args = tuple(
                    a.args[0].args[0]
                    if a.target is aten.neg.default and a.args[0].target is aten.neg.default
                    else a
                    for a in node.args
                )

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.neg().neg() + self.weight

    def make():
        return example_of(Twice(), lambda step: torch.full((4, 8), float(step + 1)))

    def count(managed: nn.Module) -> int:
        ops = managed.plan.problem.ops
        return sum("aten.neg" in op.name for op in ops)

    before = count(manage(make()))
    new = Pass(
        "double_negation",
        "forward",
        without_double_negation,
        does="What is negated twice is read before.",
        exact="A negation changes the sign bit alone.",
    )
    monkeypatch.setattr(passes, "PASSES", (*PASSES, new))
    example = make()
    managed = manage(example)
    assert (before, count(managed)) == (2, 0)
    assert_same(train(make()), train(example, managed))
