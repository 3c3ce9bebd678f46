"""The cheapest Python call that runs one op.

`torch.ops.aten.mm.default(a, b)` reads its arguments against a schema; `torch.mm(a, b)` and
`a.mm(b)` reach the same kernel in two thirds of the time. A short form is used only where a trial
on fake tensors shows that it dispatches exactly this op with exactly these arguments; an
op without one is called through its bare overload.
"""

import functools
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import facts
from rekindle.capture.tensor_args import map_numbers
from rekindle.torch_compat import (
    TorchDispatchMode,
    add_call,
    bare_call,
    eager_kernels,
    hint_of,
    is_overload,
    is_symbolic,
    nn_functions,
)

_forms: dict[Any, str] = {}  # kind of call -> "method", "function", "nn" or "bare"


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Adds the call to the graph; the facts of its tensor arguments tell their kind."""
    if not is_overload(target) or target.namespace != "aten":
        return add_call(graph, "call_function", target, args, kwargs)
    name = target._schema.name.split("::")[1]
    match _form(target, name, args, kwargs):
        case "method":
            return add_call(graph, "call_method", name, args, kwargs)
        case "function":
            return add_call(graph, "call_function", getattr(torch, name), args, kwargs)
        case "nn":
            return add_call(graph, "call_function", getattr(nn_functions, name), args, kwargs)
        case _:
            return add_call(graph, "call_function", bare_call(target), args, kwargs)


def _form(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    found: list[Any] = []  # what the tensors among the arguments are like
    kinds = _kind(args, found), _kind(kwargs, found)
    if not found:
        return "bare"  # makes a tensor from nothing: a trial would fill it, or draw from the stream
    if any(like is None for like in found):
        return "bare"
    key = (target, *kinds)
    form = _forms.get(key)
    if form is None:
        form = _forms[key] = _try_forms(target, name, (args, kwargs))
    return form


def _kind(arg: Any, found: list[Any]) -> Any:
    if isinstance(arg, fx.Node):
        like = facts(arg).value
        found.append(like)
        return None if like is None else (like.dtype, like.dim() == 0)
    if isinstance(arg, (list, tuple)):
        return (type(arg), *[_kind(a, found) for a in arg])
    if isinstance(arg, dict):
        return (type(arg), *[(k, _kind(a, found)) for k, a in arg.items()])
    return int if is_symbolic(arg) else type(arg)


def _try_forms(target: Any, name: str, call: Any) -> str:
    def as_meta(leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        like = facts(leaf).value
        shape, stride = (tuple(map(hint_of, numbers)) for numbers in (like.shape, like.stride()))
        return torch.empty_strided(shape, stride, dtype=like.dtype, device="meta")

    args, kwargs = fx.node.map_aggregate(map_numbers(hint_of, call), as_meta)
    # Cheapest first: all of these parse their arguments in generated C, not by a schema.
    forms: list[tuple[str, Any]] = []
    if args and isinstance(args[0], torch.Tensor) and hasattr(torch.Tensor, name):
        forms.append(("method", functools.partial(_method, name)))
    if isinstance(getattr(torch, name, None), type(torch.mm)):
        forms.append(("function", getattr(torch, name)))
    if hasattr(nn_functions, name):
        forms.append(("nn", getattr(nn_functions, name)))
    for form, function in forms:
        if _dispatches(function, target, args, kwargs):
            return form
    return "bare"


def _method(name: str, self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return getattr(self, name)(*args, **kwargs)


class _Probe(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dispatches(function: Any, target: Any, args: Any, kwargs: Any) -> bool:
    """Whether the call reaches this one op with these very arguments."""
    probe = _Probe()
    try:
        # On meta tensors, below autograd: nothing is computed and no graph is made.
        with eager_kernels(), probe:
            function(*args, **kwargs)
    except Exception:  # a form that does not take these arguments: the next one may
        return False
    if len(probe.calls) != 1 or probe.calls[0][0] is not target:
        return False
    # The same op is not enough: a method may fill in another default, or turn a number into a
    # tensor.
    mine, theirs = _bound(target, args, kwargs), _bound(target, *probe.calls[0][1:])
    return mine.keys() == theirs.keys() and all(_same(mine[k], theirs[k]) for k in mine)


def _bound(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Every argument by name, defaults filled in."""
    found = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            found[argument.name] = args[position]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a is b
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    # 1, 1.0 and True are equal to Python and not to an op.
    return type(a) is type(b) and bool(a == b)
