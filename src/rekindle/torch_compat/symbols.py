"""Symbolic sizes: what stands for a size that changes from call to call.

torch decides on such a number by its hint, the size of the call that was traced, and notes each
decision as a guard. The guards of one trace say for which sizes all its decisions are the same.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from sympy import sympify  # type: ignore[import-untyped]
from torch._guards import TracingContext
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NotASize(Exception):
    """A number that is no expression over whole sizes."""


class _Printer(PythonPrinter):  # type: ignore[misc]
    """Expressions in the words that `core.sizes` knows."""

    def _print_Max(self, expr: Any) -> str:
        return f"max({', '.join(map(self._print, expr.args))})"

    def _print_Min(self, expr: Any) -> str:
        return f"min({', '.join(map(self._print, expr.args))})"

    def _print_FloorDiv(self, expr: Any) -> str:
        return f"({super()._print_FloorDiv(expr)})"

    _print_CleanDiv = _print_FloorDiv

    def _print_Mod(self, expr: Any) -> str:
        return f"({super()._print_Mod(expr)})"

    _print_PythonMod = _print_Mod

    def _print_ToFloat(self, expr: Any) -> str:
        return f"float({self._print(expr.args[0])})"

    def _print_Float(self, expr: Any) -> str:
        return repr(float(expr))


def is_symbolic(number: object) -> bool:
    """Whether a number hangs on sizes that change."""
    return isinstance(number, SYMBOLIC)


def has_symbols(tensor: torch.Tensor) -> bool:
    """Whether a size of the tensor is one that changes."""
    return bool(tensor._has_symbolic_sizes_strides)


def hint_of(number: Any) -> Any:
    """A number as it was when the call was traced; no guard is noted."""
    return number.node.hint if isinstance(number, SYMBOLIC) else number


def expression_key(number: Any) -> Any:
    """Equal for numbers that are equal whatever the sizes are; hashable, unlike the number."""
    return number.node.expr if isinstance(number, SYMBOLIC) else number


def known_equal(first: Any, second: Any) -> bool:
    """Whether two numbers, or sequences of them, are equal for all sizes. No guard is noted."""
    if isinstance(first, (tuple, list, torch.Size)):
        return len(first) == len(second) and all(map(known_equal, first, second))
    if isinstance(first, SYMBOLIC) or isinstance(second, SYMBOLIC):
        node = first.node if isinstance(first, SYMBOLIC) else second.node
        a, b = sympify(expression_key(first)), sympify(expression_key(second))
        return bool(a == b or node.shape_env.replace(a) == node.shape_env.replace(b))
    return bool(first == second)


_MOST = 2**32 - 1  # of a size


@contextlib.contextmanager
def every_decision_noted(shape_env: Any) -> Iterator[None]:
    """Inside, torch decides by the traced size also where it would else leave a question open and
    go a way that is right for any size: eager, which knows the size, decides. No size is so large
    that it is compared with what stands for no end."""
    for symbol, limits in list(shape_env.var_to_range.items()):
        shape_env.var_to_range[symbol] = limits & ValueRanges(0, _MOST)
    own = SymNode.statically_known_true
    SymNode.statically_known_true = SymNode.guard_bool
    try:
        yield
    finally:
        SymNode.statically_known_true = own


def known_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies without gaps in the order of its dimensions, whatever the sizes are."""
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not known_equal(size, 1) and not known_equal(stride, expected):
            return False
        expected = expected * size
    return True


def tracing_symbols() -> Any:
    """Where Dynamo, which reads now, keeps its symbols."""
    context = TracingContext.try_get()
    assert context is not None
    assert context.fake_mode is not None
    return context.fake_mode.shape_env


def symbols_go_on(shape_env: Any) -> None:
    """Guards are noted further on, though Dynamo has written its own."""
    shape_env.frozen = False


@contextlib.contextmanager
def sizes_marked(marks: Iterable[tuple[torch.Tensor, Sequence[int]]]) -> Iterator[None]:
    """Inside, Dynamo takes these dimensions of these tensors as sizes that change."""
    name = "_dynamo_weak_dynamic_indices"
    marked = []
    try:
        for tensor, dims in marks:
            setattr(tensor, name, set(dims))
            marked.append(tensor)
        yield
    finally:
        for tensor in marked:
            delattr(tensor, name)


def size_text(number: Any) -> str:
    """A number as an expression over the names of its symbols."""
    if not isinstance(number, SYMBOLIC):
        return repr(number)
    expression = number.node.shape_env.replace(number.node.expr)
    whole = isinstance(number, torch.SymInt)
    if not (expression.is_integer if whole else _rounds_once(expression)):
        raise NotASize(str(expression))
    return str(_Printer().doprint(expression))


def _rounds_once(expression: Any) -> bool:
    """Whether a float is a quotient of whole numbers, or one of them: sums and products of floats
    may have been put in another order, which changes their last bits."""
    if expression.is_number or expression.is_integer:
        return True
    kind = type(expression).__name__
    if kind not in ("ToFloat", "IntTrueDiv", "FloatTrueDiv"):
        return False
    return all(
        part.is_number or part.is_integer or (kind == "FloatTrueDiv" and _is_float_of_whole(part))
        for part in expression.args
    )


def _is_float_of_whole(expression: Any) -> bool:
    return type(expression).__name__ == "ToFloat" and bool(expression.args[0].is_integer)


def pinned(shape_env: Any, name: str) -> bool:
    """Whether a symbol was decided to be one number."""
    symbols = {str(symbol): symbol for symbol in shape_env.var_to_range}
    return bool(shape_env.replace(symbols[name]).is_number)


def symbol_name(number: Any) -> str | None:
    """The name of a number that is a symbol of its own, or was before it was found equal to
    another number."""
    if not isinstance(number, torch.SymInt):
        return None
    expression = number.node._expr
    return str(expression) if expression.is_Symbol else None


def free_symbols(number: Any) -> set[str]:
    """The names of the symbols in a number."""
    if not isinstance(number, SYMBOLIC):
        return set()
    return {str(symbol) for symbol in number.node._expr.free_symbols}


def conditions_of(shape_env: Any, names: Sequence[str]) -> tuple[str, ...]:
    """What has been decided of these symbols so far, as conditions. torch takes every size to be
    2 or more unless the traced one was not."""
    if shape_env.deferred_runtime_asserts:
        raise NotASize("a size that depends on data")
    printer = _Printer()
    found: dict[str, None] = {}
    ranges = {str(symbol): limits for symbol, limits in shape_env.var_to_range.items()}
    for name in names:
        for limit, sign in ((ranges[name].lower, ">="), (ranges[name].upper, "<=")):
            if getattr(limit, "is_Integer", False):
                found[f"{name} {sign} {int(limit)}"] = None
    for guard in shape_env.guards:
        found[str(printer.doprint(guard.expr))] = None
    return tuple(found)


def num_guards(shape_env: Any) -> int:
    """How many decisions were noted so far."""
    return len(shape_env.guards)
