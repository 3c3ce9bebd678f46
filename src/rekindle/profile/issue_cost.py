"""What the host needs to issue a small op among others, and in a loop of the same op.

An op that is measured alone is issued faster than in a step: caches and branch predictors know it
by heart. How much faster is a property of the machine, measured once for each bench.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, slots=True)
class StreamCost:
    """What the host needs for a small op: in a loop of the same op, where caches and branch
    predictors know it by heart, and in a stream of different ops."""

    alone_ns: float
    mixed_ns: float


def stream_cost(device: torch.device, num_ops: int = 480, num_passes: int = 7) -> StreamCost:
    """By a long chain of small ops in generated code, as a lowered plan is, each line of which runs
    once."""
    x = torch.zeros(16, 16, device=device)
    weight = torch.zeros(16, device=device)
    aten = torch.ops.aten
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.mm.default, ("x", "x")),
        (aten.add.Tensor, ("x", "x")),
        (aten.view.default, ("x", [8, 32])),
        (aten.native_layer_norm.default, ("x", [16], "w", "w", 1e-5)),
        (aten.t.default, ("x",)),
        (aten.addmm.default, ("w", "x", "x")),
        (aten.gelu.default, ("x",)),
        (aten.mul.Tensor, ("x", "x")),
        (aten._softmax.default, ("x", 1, False)),
        (aten.sum.dim_IntList, ("x", [0], True)),
        (aten.relu.default, ("x",)),
        (aten.clone.default, ("x",)),
        (aten.threshold_backward.default, ("x", "x", 0)),
        (aten.expand.default, ("w", [16, 16])),
        (aten.cat.default, (["x", "x"], 1)),
        (aten.sigmoid.default, ("x",)),
    ]

    def filled(arg: Any, names: dict[str, Any]) -> Any:
        if isinstance(arg, list):
            return [filled(a, names) for a in arg]
        return names.get(arg, arg) if isinstance(arg, str) else arg

    # Generated code, each line of which runs once per pass: a loop would be learnt by heart again.
    graph = fx.Graph()
    names = {"x": graph.placeholder("x"), "w": graph.placeholder("w")}
    for i in range(num_ops):
        target, args = calls[i % len(calls)]
        graph.call_function(target, tuple(filled(a, names) for a in args))
    graph.output(names["x"])
    chain = fx.GraphModule(torch.nn.Module(), graph).forward

    def clock(run: Callable[[], Any], repeats: int) -> float:
        _settle(device)
        # The thread's own clock: a pass is long enough for another process to come between.
        begin = time.thread_time_ns()
        for _ in range(repeats):
            run()
        return (time.thread_time_ns() - begin) / repeats

    tensors = {"x": x, "w": weight}
    alone = []
    with torch.no_grad():
        for target, args in calls:
            given = tuple(filled(a, tensors) for a in args)
            run = functools.partial(target, *given)
            # The first calls load kernels and fill caches.
            clock(run, 3)
            alone.append(statistics.median(clock(run, 20) for _ in range(3)))
        clock(lambda: chain(x, weight), 2)
        mixed = statistics.median(clock(lambda: chain(x, weight), 1) for _ in range(num_passes))
    return StreamCost(max(1.0, statistics.mean(alone)), mixed / num_ops)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
