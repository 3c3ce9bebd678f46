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

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from rekindle.api import MAX_PLANS, Options, manage_plan
from rekindle.errors import NothingToPlan, RekindleError

log = logging.getLogger("rekindle")
_NOT_HERE = frozenset({"loss_fn", "on_progress"})  # Dynamo's graph has no place for them
_said: set[str] = set()


class BadOption(RekindleError, ValueError):
    """An entry of `options` that the backend does not know."""


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """What Dynamo calls once per graph."""
    settings, max_plans = _settings(options)
    _tell_of_break(graph)
    managed = manage_plan(settings, None, _Graph(graph), (), {}, True, "replan", max_plans)
    return _Planned(graph, managed)


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


def _settings(options: Mapping[str, Any] | None) -> tuple[Options, int]:
    given = dict(options or {})
    max_plans = given.pop("max_plans", MAX_PLANS)
    known = [f.name for f in dataclasses.fields(Options) if f.name not in _NOT_HERE]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise BadOption(
            f"backend 'rekindle' has no option {unknown[0]!r}; it knows "
            f"{', '.join([*known, 'max_plans'])}"
        )
    if not any(given.get(name) is not None for name in ("budget", "device_budget", "schedule")):
        raise BadOption(
            "backend 'rekindle' needs a budget: torch.compile(model, backend='rekindle', "
            "options={'budget': '8GiB'})"
        )
    settings = Options(**given)
    _ = settings.wishes  # refused now, not at the first call
    return settings, max_plans


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
