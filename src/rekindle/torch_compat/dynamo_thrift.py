"""Dynamo without what it does only for its logs, for compiled code or for parts of torch that
nobody has imported: a third of the time of a first trace."""

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module


@contextlib.contextmanager
def thrift() -> Iterator[None]:
    """Inside, Dynamo reads the same and does less beside it. Needs its compile lock."""
    from torch._dynamo import graph_region_tracker, guards, output_graph
    from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase

    def no_header(_self: Any, _lineno: int | None = None, **_kwargs: Any) -> str:
        return ""  # of a line of a log: the name of the function, found by reading its file

    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, make: Any) -> None:
            if name in vars(owner):  # this release has it
                own = vars(owner)[name]
                setattr(owner, name, make(own))
                stack.callback(setattr, owner, name, own)

        put(InstructionTranslatorBase, "get_line_of_code_header", lambda _own: no_header)
        put(InstructionTranslator, "_throw_if_in_functorch", _inside_of_transforms)
        if not torch._dynamo.config.use_graph_deduplication:
            put(graph_region_tracker, "InputPickler", lambda _own: _Idle)
        put(output_graph.SubgraphTracer, "_maybe_preserve_original_meta", _with_one_line)
        put(output_graph.OutputGraph, "get_replayed_side_effect_source_refs", _where_exported)
        # How long the guards take is for a log, and is measured with emptied caches.
        put(guards, "profile_guard_manager", lambda _own: _no_time)
        higher = sys.modules.get("torch._dynamo.variables.higher_order_ops")
        local_map = getattr(higher, "LocalMapWrappedHigherOrderVariable", None)
        if local_map is not None:
            put(local_map, "should_wrap_in_hop", _where_imported)
        # Nobody calls the graph's own code: it is written when it is first needed.
        stack.enter_context(_use_lazy_graph_module(True))
        yield


class _Idle:
    """In the place of what recognizes equal parts of a graph, which only the compiler asks for."""


def _no_time(*_args: Any) -> float:
    return 0.0


def _inside_of_transforms(own: Any) -> Any:
    """The check for torch.func imports all backends first, whether or not a transform is on."""

    @functools.wraps(own)
    def check(self: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            own(self)

    return check


def _where_exported(own: Any) -> Any:
    """The list of what else a call changes is for torch.export."""

    @functools.wraps(own)
    def refs(self: Any, **kwargs: Any) -> list[str]:
        return own(self, **kwargs) if "torch.export._trace" in sys.modules else []

    return refs


def _with_one_line(own: Any) -> Any:
    """Of the stack of a node, the innermost line of code that is not a layer's of torch. To leave
    out more of it, all of the compiler would be imported first."""

    @functools.wraps(own)
    def preserve(self: Any, tx: Any, node: fx.Node) -> None:
        own(self, tx, node)
        while tx is not None and "stack_trace" not in node.meta:
            if not tx.is_co_filename_from_nn_modules():
                node.stack_trace = f'  File "{tx.f_code.co_filename}", line {tx.lineno}'
            tx = getattr(tx, "parent", None)
        node.meta.setdefault("stack_trace", "")

    return preserve


def _where_imported(own: Any) -> Any:
    """Whether a value is one of a module is known where nobody has imported the module."""

    def is_wrapped(cls: Any, value: Any) -> bool:
        if "torch.distributed.tensor.experimental._func_map" not in sys.modules:
            return False
        return bool(own.__func__(cls, value))

    return classmethod(is_wrapped)
