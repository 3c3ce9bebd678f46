"""`torch.compile(model, backend="rekindle", options={"budget": "8GiB"})`.

Dynamo finds the graph, this backend plans it when it is first called with gradients, and runs the
plan with eager's own kernels: nothing is fused. Parameters and buffers are inputs of Dynamo's
graph, so the budget counts what it always counts. torch finds the backend through the entry point
group `torch_dynamo_backends`.

Graph breaks: each graph has a plan, and the budget holds for each graph alone. What one graph keeps
for its backward is still there while the next one runs, so all together may need up to the sum;
`fullgraph=True` refuses such models, and `rekindle.rematerialize` does not need Dynamo at all.

Patterns of `save` and `recompute` mean ops here ("aten.mm*"): Dynamo's graph has no modules.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from rekindle.errors import NothingToPlan
from rekindle.integrate.adapter_options import settings_of

log = logging.getLogger("rekindle")
_said: set[str] = set()


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """What Dynamo calls once per graph."""
    settings = settings_of(options or {}, "backend 'rekindle' (torch.compile's options={...})")
    _tell_of_break(graph)
    return _Planned(graph, settings.manage(_Graph(graph)))


class _Graph(nn.Module):  # type: ignore[misc]
    """A graph as a module with a forward of its own: a GraphModule writes its forward lazily."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *args: Any) -> Any:
        return self.graph(*args)


class _Planned:
    """Runs the plan; a graph in which nothing can be planned runs as it is."""

    def __init__(self, graph: nn.Module, managed: nn.Module) -> None:
        self.graph = graph
        self.managed: nn.Module | None = managed

    def __call__(self, *args: Any) -> Any:
        if self.managed is None or not torch.is_grad_enabled():
            return self.graph(*args)
        try:
            return self.managed(*args)
        except NothingToPlan as error:  # a piece between graph breaks that no gradient goes through
            log.info("a graph of torch.compile runs without a plan: %s", error)
            self.managed = None
            return self.graph(*args)


def _tell_of_break(graph: fx.GraphModule) -> None:
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return
    why = " ".join(str(getattr(reason, "reason", "")).split())[:160]
    if why not in _said:
        _said.add(why)
        log.warning(
            "torch.compile breaks the model into several graphs (%s): the budget holds for each "
            "graph alone, and all together may need up to the sum; use rekindle.rematerialize, or "
            "fullgraph=True to refuse",
            why,
        )
