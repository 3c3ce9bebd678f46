"""Dynamo, which reads the Python of a model."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx


def is_saved_region(target: object) -> bool:
    """The op that Dynamo puts in the place of torch.utils.checkpoint."""
    return target is torch.ops.higher_order.tag_activation_checkpoint


@contextlib.contextmanager
def _not_compiling() -> Iterator[None]:
    """Code that Dynamo reads and that asks whether it is being compiled hears no."""
    from torch._dynamo.variables.torch import tracing_state_functions

    # torch.compiler.is_compiling and its kin. A model that hears yes may take other branches than
    # in eager, with other kernels (transformers does, for attention masks).
    answers = tracing_state_functions()
    saved = dict(answers)
    answers.update({question: False for question, answer in saved.items() if answer is True})
    try:
        yield
    finally:
        answers.update(saved)


def read_whole(
    function: Callable[..., Any], run_graph: Callable[[fx.GraphModule, tuple[Any, ...]], Any]
) -> Callable[..., Any]:
    """`function` as Dynamo reads it, in one graph of torch calls that `run_graph` runs; raises
    where it cannot be read whole."""
    import torch._dynamo

    # Dynamo keeps what it has read by code object: one that nobody else has.
    fresh = types.FunctionType(function.__code__.replace(), function.__globals__)

    def backend(graph: fx.GraphModule, _examples: Any) -> Callable[..., Any]:
        return lambda *args: run_graph(graph, args)

    def call(*args: Any, **kwargs: Any) -> Any:
        settings = {"trace_numpy": False, "capture_scalar_outputs": True, "verbose": False}
        with _not_compiling(), torch._dynamo.config.patch(settings):
            read = torch.compile(fresh, backend=backend, fullgraph=True, dynamic=False)
            return read(*args, **kwargs)

    return call
