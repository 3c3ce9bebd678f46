"""Calls are added to a graph as fx adds them, only faster."""

import operator

import pytest
import torch
from torch import fx

from rekindle.torch_compat import add_call, fx_graphs, named_call

aten = torch.ops.aten


def by_fx(graph, op, target, args, kwargs):
    return graph.create_node(op, target, args, kwargs)


def chain(add):
    graph = fx.Graph()
    x = graph.placeholder("add")  # a name that is taken
    for _ in range(3):
        total = add(graph, "call_function", aten.add.Tensor, (x, x), {"alpha": 2})
        normed = add(graph, "call_function", aten.native_layer_norm.default, (total, [4]), {})
        x = add(graph, "call_function", operator.getitem, (normed, 0), {})
        x = add(graph, "call_method", "view", (x, [2, (1, 2)]), {})
        x = add(graph, "call_function", named_call(torch.relu, "fusedRelu_1"), (x,), {})
    graph.output(x)
    graph.lint()
    return graph


def account(graph):
    return [
        (n.name, n.op, str(n.args), str(n.kwargs), type(n.kwargs), [u.name for u in n.users])
        for n in graph.nodes
    ]


@pytest.mark.parametrize("release", ["this one", "one that sets arguments one by one"])
def test_the_graph_is_the_one_of_fx(monkeypatch, release):
    if release != "this one":
        monkeypatch.setattr(fx_graphs, "_set_arguments", fx_graphs._update)
    ours, theirs = chain(add_call), chain(by_fx)
    assert account(ours) == account(theirs)
    assert len(ours.find_nodes(op="call_function", target=operator.getitem)) == 3
