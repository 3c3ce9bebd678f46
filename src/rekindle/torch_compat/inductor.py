"""Inductor, torch.compile's compiler: a joint graph cut in two, and one graph compiled.

What compiles to what is Inductor's own affair; here stands how it is called, with which settings,
and where its kernels are found afterwards.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# No buffer is used again for another value, so that a schedule decides what lies where; no graphs
# of kernels, since the order is the schedule's. All else is as torch.compile has it, kernels that
# write over what dies included.
_SETTINGS: dict[str, Any] = {
    "allow_buffer_reuse": False,
    "triton.cudagraphs": False,
    "cpp_wrapper": False,
    "graph_partition": False,
    "memory_planning": False,
}


@dataclass(frozen=True, slots=True)
class CompiledText:
    """The wrapper that Inductor wrote for one graph: its text, and the names that it uses."""

    text: str
    scope: dict[str, Any]


@contextlib.contextmanager
def inductor_settings() -> Iterator[None]:
    """How graphs are cut and compiled inside."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    known = {name: value for name, value in _SETTINGS.items() if _has(config, name)}
    # Its own budget would decide the same thing a second time.
    with config.patch(known), functorch_config.patch(activation_memory_budget=1.0):
        yield


def _has(config: Any, name: str) -> bool:
    try:
        for part in name.split("."):
            config = getattr(config, part)
    except AttributeError:
        return False
    return True


def symbol_free_fake_mode() -> Any:
    """A fake mode such as Inductor expects to find on its inputs."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def functional_trace(run: Callable[..., Any], *nests: Any) -> fx.GraphModule:
    """The graph of a function on fake tensors, without in-place ops, of the ops that Inductor
    knows. Its placeholders are called as the function's arguments."""
    import torch._inductor.compile_fx  # some decompositions look for modules that it imports
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    functional = torch.func.functionalize(run, remove="mutations")
    # make_fx names placeholders after the arguments of what it is given.
    names = run.__code__.co_varnames[: run.__code__.co_argcount]
    scope: dict[str, Any] = {"run": functional}
    exec(f"def call({', '.join(names)}): return run({', '.join(names)})", scope)
    with torch.no_grad(), fx.traceback.preserve_node_meta():
        made = make_fx(scope["call"], decomposition_table=select_decomp_table())(*nests)
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


class _Origin:
    """What Inductor names in its comments as the source of a kernel."""

    def __init__(self, name: str) -> None:
        self.name = name


def trace_as(name: str) -> None:
    """What `functional_trace` writes down from here on comes from a node of this name; the wrapper
    text says of each kernel which names it came from."""
    fx.traceback.current_meta["from_node"] = [_Origin(name)]


def cut_in_two(
    joint: fx.GraphModule, inputs: Sequence[Any], num_forward_outputs: int, mode: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward, as torch.compile cuts a joint graph."""
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.virtualized import V

    with V.set_fake_mode(mode):
        forward, backward = partition_fn(joint, list(inputs), num_fwd_outputs=num_forward_outputs)
    return forward, backward


def compile_graph(
    graph: fx.GraphModule, inputs: Sequence[Any], visible: Sequence[int], kind: str, mode: Any
) -> CompiledText:
    """Compiles a graph that was cut. `visible`: the outputs whose layout must be kept. `kind`:
    "forward", "backward", or "inference"."""
    from torch._inductor.compile_fx import compile_fx_inner, get_static_input_idxs
    from torch._inductor.virtualized import V

    next(iter(reversed(graph.graph.nodes))).meta["user_visible_output_idxs"] = list(visible)
    with V.set_fake_mode(mode), torch.no_grad():
        compiled = compile_fx_inner(
            graph,
            list(inputs),
            static_input_idxs=get_static_input_idxs(len(inputs)),
            is_backward=kind == "backward",
            is_inference=kind == "inference",
        )
    if not hasattr(compiled, "source_code"):
        raise RuntimeError("Inductor found nothing to compile")
    return CompiledText(compiled.source_code, _scope(compiled.current_callable))


def _scope(function: Any) -> dict[str, Any]:
    """The globals of the wrapper's `call`, through what is wrapped around it."""
    seen: set[int] = set()
    found = [function]
    while found:
        function = found.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            if "extern_kernels" in function.__globals__:
                return function.__globals__
            found += [c.cell_contents for c in function.__closure__ or ()]
        elif hasattr(function, "func"):
            found.append(function.func)
    raise RuntimeError("the module of a compiled graph was not found")
