"""What Python reads in the backward: in hooks on tensors, and in the `backward` of a
`torch.autograd.Function`.

Dynamo reads that code with the forward, and guards what it reads when the forward runs. Eager reads
it when the backward runs, so it is compared again then.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from rekindle.torch_compat.dynamo_patches import changed

_CONTAINERS = (dict, list, tuple, set, frozenset)


class ReadLater:
    """The sources of what the backward's Python reads."""

    __slots__ = ("_containers", "_depth", "_names")

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._containers: tuple[str, ...] = ()
        self._depth = 0

    def __bool__(self) -> bool:
        return bool(self._names)

    def note(self, source: Any, value: Any) -> None:
        """This was read; within the backward's code it is remembered."""
        if self._depth and source is not None:
            name = source_name(source)
            self._names.add(name)
            if isinstance(value, _CONTAINERS):  # its items may be known from the forward
                self._containers += (name,)

    def kept(self, guards: Any) -> list[bool]:
        """Which guards are about it."""
        return [self._is_about(source_name(entry.orig_guard)) for entry in guards]

    def _is_about(self, name: str) -> bool:
        return name in self._names or name.startswith(self._containers)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, Dynamo reads code of the backward."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def source_name(source: Any) -> str:
    """The expression of a source, or of a guard; a method in torch 2.11."""
    name = source.name
    return str(name() if callable(name) else name)


@contextlib.contextmanager
def backward_reads_noted(later: ReadLater) -> Iterator[None]:
    """Inside, `later` gets what code of the backward reads."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable

    def noting(read: Any) -> Any:
        def build(self: Any, value: Any) -> Any:
            later.note(getattr(self, "source", None), value)
            return read(self, value)

        return build

    def in_backward(read: Any) -> Any:
        def trace(self: Any, *args: Any, **kwargs: Any) -> Any:
            with later.inside():
                return read(self, *args, **kwargs)

        return trace

    with contextlib.ExitStack() as stack:
        stack.enter_context(changed(VariableBuilder, "__call__", noting))
        stack.enter_context(changed(TensorVariable, "_method_register_hook", in_backward))
        # In older releases one method reads both of its parts.
        tracer = "trace_backward_graph"
        if not hasattr(AutogradFunctionApplyVariable, tracer):
            tracer = "call_function"
        stack.enter_context(changed(AutogradFunctionApplyVariable, tracer, in_backward))
        yield
