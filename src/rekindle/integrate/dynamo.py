"""`torch.compile(model, backend="rekindle", options={"budget": "8GiB"})`.

Dynamo captures the graph. This backend plans it when it is first called with gradients, and runs
the plan with eager's kernels, without fusion by Inductor. Parameters and buffers are inputs of
Dynamo's graph, hence resident, so the budget means the same as elsewhere. torch finds the backend
through the entry point group `torch_dynamo_backends`.

Graph breaks: each graph has its own plan, and the budget holds for each graph alone. What one graph
saves for its backward is still alive while the next graph runs, so the peak may be as large as the
sum. `fullgraph=True` refuses such models; `rekindle.rematerialize` does not need Dynamo.

Patterns of `save` and `recompute` can only name ops ("aten.mm*"): Dynamo's graph has no modules.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from rekindle.errors import NothingToPlan
from rekindle.integrate.adapter_options import settings_of

log = logging.getLogger("rekindle")
_warned: set[str] = set()  # reasons of graph breaks that were logged: one line each per process


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Called by Dynamo once per graph. The example inputs are fake tensors and are not used."""
    settings = settings_of(options or {}, "backend 'rekindle' (torch.compile's options={...})")
    _warn_of_graph_break(graph)
    return _Planned(graph, settings.manage(_Graph(graph)))


class _Graph(nn.Module):  # type: ignore[misc]
    """A graph as a module whose class has a `forward`."""

    # Managing a module derives from its class; a GraphModule generates its forward per instance,
    # so that it cannot be managed itself. Dynamo's generates it at its first call, which cannot be
    # read; one that is made here has it at once.

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = fx.GraphModule(graph, graph.graph)

    def forward(self, *args: Any) -> Any:
        return self.graph(*args)


class _Planned:
    """Runs the plan, or the graph itself if it has nothing to plan."""

    def __init__(self, graph: nn.Module, managed: nn.Module) -> None:
        self.graph = graph
        self.managed: nn.Module | None = managed

    def __call__(self, *args: Any) -> Any:
        if self.managed is None or not torch.is_grad_enabled():
            return self.graph(*args)
        try:
            return self.managed(*args)
        except NothingToPlan as error:  # a graph between breaks that no gradient flows through
            log.info("a graph of torch.compile runs without a plan: %s", error)
            self.managed = None
            return self.graph(*args)


def _warn_of_graph_break(graph: fx.GraphModule) -> None:
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return
    why = " ".join(str(getattr(reason, "reason", "")).split())[:160]
    if why not in _warned:
        _warned.add(why)
        log.warning(
            "torch.compile breaks the model into several graphs (%s): the budget holds for each "
            "graph alone, and the peak may be as large as their sum; use rekindle.rematerialize, "
            "or fullgraph=True to refuse such models",
            why,
        )
