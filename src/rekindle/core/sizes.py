"""Whole numbers that follow from the sizes of a call: expressions over named sizes, such as
`8*length` or `(2*length + 511)//512*512`, and conditions on those sizes.

Both are text in a small part of Python: whole numbers, names, arithmetic, `max` and `min`;
conditions compare and combine. Everything else is refused before anything is compiled. What is
compiled once is evaluated for one call in well under a microsecond a number.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.errors import InvalidProblem, brief

_ARITHMETIC = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.Call),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd),
)
_LOGIC = (
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE),
    *(ast.BoolOp, ast.And, ast.Or, ast.Not, ast.Div),
)
_FUNCTIONS = {"max": max, "min": min, "float": float}
_NO_BUILTINS: Mapping[str, Any] = {"__builtins__": {}, **_FUNCTIONS}


def expression(names: Sequence[str], text: str) -> Callable[..., Any]:
    """The function of sizes of these names that an expression is. It may be a quotient."""
    check_expression(text, names, condition=True)
    return _compiled(names, text)


def check_expression(text: str, names: Sequence[str], *, condition: bool = False) -> None:
    """Raises InvalidProblem for anything but an expression over these names."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidProblem(f"{brief(text)!r} is no expression over sizes") from None
    allowed = (*_ARITHMETIC, *_LOGIC) if condition else _ARITHMETIC
    for node in ast.walk(tree):
        known = isinstance(node, allowed)
        if isinstance(node, ast.Name):
            known = node.id in names or node.id in _FUNCTIONS
        elif isinstance(node, ast.Constant):
            known = type(node.value) in ((int, bool, float) if condition else (int,))
        elif isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
            known = known and not node.keywords
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            # A power is of a size: 10**10**10 would compute for ever.
            power = node.right
            known = isinstance(power, ast.Constant) and power.value in range(9)
        if not known:
            raise InvalidProblem(
                f"{brief(text)!r} is no expression over the sizes {', '.join(names) or 'none'}: "
                f"{type(node).__name__} may not stand in it"
            )


def _compiled(names: Sequence[str], text: str) -> Callable[..., Any]:
    # The text was checked: it has names, numbers and operators alone.
    code = compile(f"lambda {', '.join(names)}: {text}", "<sizes>", "eval")
    function: Callable[..., Any] = eval(code, dict(_NO_BUILTINS))
    return function


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Distinct expressions over the same names, evaluated together."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    _function: Callable[..., tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.names:
            if not name.isidentifier() or name in _FUNCTIONS:
                raise InvalidProblem(f"{brief(name)!r} is no name of a size")
        for text in self.texts:
            check_expression(text, self.names)
        text = f"({''.join(f'{t}, ' for t in self.texts)})"
        object.__setattr__(self, "_function", _compiled(self.names, text))

    def at(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The value of each expression where the names stand for these sizes."""
        return self._function(*sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeTable, (self.names, self.texts)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What sizes must keep: where a family of shapes ends."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    _function: Callable[..., bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for text in self.texts:
            check_expression(text, self.names, condition=True)
        text = " and ".join(f"({t})" for t in self.texts) or "True"
        object.__setattr__(self, "_function", _compiled(self.names, text))

    def hold(self, sizes: Sequence[int]) -> bool:
        """Whether these sizes keep all of them."""
        try:
            return bool(self._function(*sizes))
        except ZeroDivisionError:  # an empty batch, of which a share is asked
            return False

    def broken(self, sizes: Sequence[int]) -> str | None:
        """The first condition that these sizes do not keep."""
        for text in self.texts:
            if not Conditions(self.names, (text,)).hold(sizes):
                return text
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return Conditions, (self.names, self.texts)
