"""Signatures: equal for ops that cost the same, different for any other."""

import json

import pytest
import torch
from support.profile_graphs import Gpt, joint_graph, model_graphs, trace
from torch import Tensor

from rekindle.profile import signature
from rekindle.profile.op_signature import spec_of
from rekindle.profile.profiler import distinct_calls


def calls_of(fn, *args):
    return [signature(n) for n in trace(fn, *args).nodes if n.op == "call_function"]


def test_equal_calls_have_equal_keys_and_layers_add_none():
    ids = torch.randint(0, 131, (2, 16))
    few = distinct_calls(joint_graph(Gpt(2), lambda out: out, ids).nodes)
    many = distinct_calls(joint_graph(Gpt(6), lambda out: out, ids).nodes)
    assert len(many[0]) > 2 * len(few[0])
    assert {c.key for c in many[2]} == {c.key for c in few[2]}


@pytest.mark.parametrize(
    ("fn", "a", "b"),
    [
        (torch.sin, torch.zeros(4, 6), torch.zeros(6, 4)),
        (torch.sin, torch.zeros(4, 6), torch.zeros(6, 4).t()),
        (torch.sin, torch.zeros(4), torch.zeros(4, dtype=torch.float64)),
        (torch.sin, torch.zeros(8)[:4], torch.zeros(8)[4:]),
        (torch.sin, torch.zeros(4), torch.zeros(8)[:4]),
    ],
    ids=["shape", "stride", "dtype", "offset", "storage"],
)
def test_what_changes_the_cost_changes_the_key(fn, a, b):
    keys = [[c.key for c in calls_of(fn, t) if "sin" in c.name] for t in (a, b)]
    assert keys[0] != keys[1]


def test_a_conjugate_that_the_op_must_resolve_is_told_apart():
    x = torch.zeros(4).cfloat()
    assert spec_of(x, {}).lazy == ""
    assert spec_of(x.conj(), {}).lazy == "conj"


def test_constants_and_shared_storages_are_part_of_the_key():
    x, y = torch.zeros(4), torch.zeros(4)
    same = calls_of(lambda a, b: a * a, x, y)[-1]
    other = calls_of(lambda a, b: a * b, x, y)[-1]
    assert same.key != other.key
    one = calls_of(lambda a: a + 1.0, x)[-1]
    two = calls_of(lambda a: a + 2.0, x)[-1]
    assert one.key != two.key
    assert one.key == calls_of(lambda a: a + 1.0, y)[-1].key


def test_key_is_json_without_infinities():
    call = calls_of(lambda a: torch.clamp(a, max=float("inf")), torch.zeros(3))[-1]
    assert json.loads(call.key)[0] == "aten.clamp.default"


def test_views_and_new_storages_are_told_apart():
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        first, second = x.split(2)
        return first.t(), first + second, x.view(-1).mul_(2)

    calls = {c.name: c for c in calls_of(fn, torch.zeros(4, 3))}
    assert calls["aten.split.Tensor"].is_view
    assert calls["aten.t.default"].is_view
    assert not calls["aten.add.Tensor"].is_view
    assert not calls["aten.mul_.Tensor"].is_view


def test_only_calls_have_a_signature():
    placeholder = next(iter(trace(torch.sin, torch.zeros(2)).nodes))
    with pytest.raises(ValueError, match="placeholder"):
        signature(placeholder)


@pytest.mark.parametrize("name", ["gpt", "resnet", "fno"])
def test_quick_keys_find_the_same_calls(name):
    nodes = [n for n in model_graphs()[name].nodes if n.op == "call_function"]
    names, which, calls = distinct_calls(nodes)
    assert names == [n.name for n in nodes]
    assert [calls[i].key for i in which] == [signature(n).key for n in nodes]
    assert len({c.key for c in calls}) == len(calls)


def test_quick_keys_tell_numbers_of_different_kinds_apart():
    graph = trace(lambda a: (a * 1, a * 1.0, a * True, a * a, a * a.clone()), torch.zeros(3))
    _, which, calls = distinct_calls(graph.nodes)
    products = [i for i in which if calls[i].name.startswith("aten.mul")]
    assert len(set(products)) == len(products) == 5
