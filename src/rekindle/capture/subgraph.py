"""Parts of a recorded graph, run for real: what a question to the data is answered with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts
from rekindle.capture.random_streams import generators_of, left_alone
from rekindle.capture.tensor_args import map_numbers
from rekindle.torch_compat import hint_of

_META = torch.device("meta")


def slice_of(
    graph: fx.Graph, wanted: list[fx.Node], num_before: int | None = None
) -> list[fx.Node]:
    """The nodes that the wanted ones depend on, in order, mutations of their storages included;
    of the first `num_before` nodes of the graph."""
    needed = set(wanted)
    storages = {facts(n).storage for n in wanted}
    nodes = list(graph.nodes)[:num_before]
    for node in reversed(nodes):
        if node not in needed:
            if not any(facts(n).storage in storages for n in facts(node).writes):
                continue
            needed.add(node)
        for argument in node.all_input_nodes:
            needed.add(argument)
            storages.add(facts(argument).storage)
    return [node for node in nodes if node in needed]


def run_slice(
    needed: list[fx.Node],
    reals: Mapping[fx.Node, torch.Tensor],
    wanted: list[fx.Node],
    *,
    keep_stream: bool = False,
) -> dict[fx.Node, Any]:
    """The values of the wanted nodes, computed for real; others die after their last use. Nothing
    outside is changed: what the slice writes to is copied first, and the random stream is put
    back, unless the caller does that (`keep_stream`)."""
    written = {facts(n).storage for node in needed for n in facts(node).writes}
    devices = sorted({t.get_device() for t in reals.values() if t.is_cuda})
    last = {a: node for node in needed for a in node.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    own = () if keep_stream else generators_of(needed)
    with torch.random.fork_rng(devices, enabled=not keep_stream), left_alone(own):
        for node in needed:
            if node.op == "placeholder":
                real = reals[node].detach()
                values[node] = real.clone() if facts(node).storage in written else real
                continue
            given = map_numbers(hint_of, (node.args, node.kwargs))
            args, kwargs = fx.node.map_arg(given, values.__getitem__)
            if kwargs.get("device") == _META:  # what a model without data makes of nothing
                kwargs = {**kwargs, "device": torch.device("cpu")}
            values[node] = node.target(*args, **kwargs)
            for argument in node.all_input_nodes:
                if last[argument] is node and argument not in wanted:
                    del values[argument]
    return values
