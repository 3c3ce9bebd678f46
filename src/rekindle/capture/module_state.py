"""A model that is captured is left as it was: parameters, buffers, attributes, random streams, and
the tables that Python code keeps of tensors.

What its forward sets on itself is found out on the way. A tensor set as an attribute (an auxiliary
loss, an attention map, a buffer that is replaced) becomes an output that each call sets again.
What a plan could not repeat is refused by name.
"""

import contextlib
import functools
import gc
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rekindle.capture import op_effects
from rekindle.capture.node_facts import facts, source_of
from rekindle.capture.recorder import Recorder
from rekindle.errors import CaptureError
from rekindle.torch_compat import python_references

_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class _Before:
    """A module before its forward ran: its attributes, the tables that are changed in place, and
    what stands in for the tensors in them."""

    module: nn.Module
    path: str
    attributes: dict[str, Any]
    tables: tuple[tuple[dict[str, Any], dict[str, Any]], ...]
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    stand_ins: dict[str, Any]
    contents: dict[str, dict[Any, Any]]  # of the stand-ins that are lists, tuples or dicts


@contextlib.contextmanager
def left_as_it_was(
    model: nn.Module, fakes: Mapping[int, torch.Tensor]
) -> Iterator[tuple[_Before, ...]]:
    """Fake tensors stand in for parameters and buffers inside; afterwards every module has its
    attributes back, those that `forward` set included."""
    saved = tuple(_before(module, path, fakes) for path, module in model.named_modules())
    python_state = random.getstate()
    try:
        for before in saved:
            before.module._parameters.update(before.parameters)
            before.module._buffers.update(before.buffers)
            before.module.__dict__.update(before.stand_ins)
        yield saved
    finally:
        for before in saved:
            before.module.__dict__.clear()
            before.module.__dict__.update(before.attributes)
            for table, contents in before.tables:
                table.clear()
                table.update(contents)
        drew = random.getstate() != python_state
        random.setstate(python_state)
    if drew:
        raise CaptureError(
            "forward draws from Python's `random`, which a plan would freeze; draw with torch"
        )


def _before(module: nn.Module, path: str, fakes: Mapping[int, torch.Tensor]) -> _Before:
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            f"{path or 'the model'} is a TorchScript module, whose code is not Python: its ops and "
            "parameters cannot be followed; use the nn.Module it was made from"
        )
    # Tables of the module itself, hooks among them, are changed in place: their contents count.
    tables = tuple(
        (table, dict(table))
        for name, table in module.__dict__.items()
        if isinstance(table, dict) and (name in _TABLES or "hooks" in name)
    )
    stand_ins = {
        name: _stand_in(value, fakes)
        for name, value in module.__dict__.items()
        if name not in _TABLES and type(value) in (torch.Tensor, list, tuple, dict)
        if "hooks" not in name
    }
    return _Before(
        module,
        path,
        dict(module.__dict__),
        tables,
        {name: _stand_in(value, fakes) for name, value in module._parameters.items()},
        {name: _stand_in(value, fakes) for name, value in module._buffers.items()},
        stand_ins,
        {name: _items(value) for name, value in stand_ins.items()},
    )


def _stand_in(value: Any, fakes: Mapping[int, torch.Tensor], depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return fakes.get(id(value), value)
    if depth < 2 and type(value) in (list, tuple):
        return type(value)(_stand_in(v, fakes, depth + 1) for v in value)
    if depth < 2 and type(value) is dict:
        return {k: _stand_in(v, fakes, depth + 1) for k, v in value.items()}
    return value


def settle(saved: tuple[_Before, ...], recorder: Recorder) -> dict[tuple[str, str], torch.Tensor]:
    """The tensors that forward has set on the modules, buffers that it replaced among them, by
    path and name: each call will set them."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for before in saved:
        module, path = before.module, before.path
        for name, new, old in _entries(module._parameters, before.parameters):
            if new is not old:
                raise _refused(f"replaces the parameter {_full(path, name)}")
        for name, new, old in _entries(module._buffers, before.buffers):
            if new is not old:
                if not isinstance(new, torch.Tensor) or not recorder.knows(new):
                    raise _refused(f"replaces the buffer {_full(path, name)}")
                found[path, name] = new
        for name, new in module.__dict__.items():
            if "hooks" in name or name in (*_TABLES, "training"):
                continue
            old = before.stand_ins.get(name, before.attributes.get(name))
            if isinstance(new, torch.Tensor) and new is not old:
                if recorder.knows(new) and not recorder.from_constants(new):
                    found[path, name] = new
            elif isinstance(new, _PLAIN) and name in before.attributes and new != old:
                raise _refused(f"changes {_full(path, name)} (from {old!r} to {new!r})")
            elif new is old and name in before.stand_ins:
                _check_container(_full(path, name), new, before.contents[name], recorder)
    _check_data(recorder)
    return found


def _entries(now: Mapping[str, Any], then: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in (*then, *(n for n in now if n not in then)):
        yield name, now.get(name), then.get(name)


def _check_container(name: str, now: Any, old: dict[Any, Any], recorder: Recorder) -> None:
    """A list or dict that forward has changed: harmless only where it is a table of constants."""
    items = _items(now)
    for key, value in items.items():
        same = key in old and old[key] is value
        if not same and not (isinstance(value, torch.Tensor) and recorder.from_constants(value)):
            raise _refused(f"changes the contents of {name}")
    if len(items) < len(old):
        raise _refused(f"changes the contents of {name}")


def _items(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return dict(container)
    return dict(enumerate(container)) if isinstance(container, (list, tuple)) else {}


def _check_data(recorder: Recorder) -> None:
    for node in recorder.graph.nodes:
        if node.op == "placeholder" and recorder.moved(node):
            source = source_of(node)
            raise CaptureError(
                f"forward gives {source.kind} {source.name} other data (`.data = ...`), which a "
                "plan cannot repeat; write into it with copy_()"
            )


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refused(what: str) -> CaptureError:
    return CaptureError(
        f"forward {what}, which a plan cannot repeat; return it from forward, write into a "
        "registered buffer in place, or manage the submodules around it one by one"
    )


@contextlib.contextmanager
def module_paths(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Keeps the recorder told of the module whose forward is running."""
    names = {id(module): name for name, module in model.named_modules()}

    def before(module: nn.Module, _args: Any) -> None:
        recorder.module_path.append(names.get(id(module), recorder.module_path[-1]))

    def after(_module: nn.Module, _args: Any, _out: Any) -> None:
        recorder.module_path.pop()

    first = nn.modules.module.register_module_forward_pre_hook(before)
    second = nn.modules.module.register_module_forward_hook(after, always_call=True)
    try:
        yield
    finally:
        first.remove()
        second.remove()


def fill_tables(recorder: Recorder) -> None:
    """Python code may keep tensors that it has built from nothing (a position table behind an
    `lru_cache` or in a global dict). Those built during the capture have no data: what keeps them
    gets the real ones, so that the model runs afterwards."""
    kept = _kept_elsewhere(recorder)
    if not kept:
        return
    for holder in gc.get_referrers(*kept.values()):
        if isinstance(holder, functools._lru_cache_wrapper):
            holder.cache_clear()
            continue
        if not isinstance(holder, (dict, list)) and hasattr(holder, "__dict__"):
            holder = vars(holder)
        if holder is kept or recorder.owns(holder):
            continue
        if isinstance(holder, dict):
            places: list[Any] = [k for k, v in holder.items() if id(v) in kept]
        elif isinstance(holder, list):
            places = [i for i, v in enumerate(holder) if id(v) in kept]
        else:
            continue
        for place in places:
            holder[place] = recorder.real_value(holder[place])


def _kept_elsewhere(recorder: Recorder) -> dict[int, torch.Tensor]:
    """By id, the tensors made of constants alone to which more refers than to others."""
    constant: set[fx.Node] = set()
    for node in recorder.graph.nodes:
        if node.op == "placeholder":
            fixed = source_of(node).kind == "constant"
        else:
            fixed = not op_effects.is_random(node.target) and constant.issuperset(
                node.all_input_nodes
            )
        if fixed:
            constant.add(node)
    counts: dict[fx.Node, int] = {}
    for node in recorder.graph.nodes:
        value = facts(node).value
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            counts[node] = python_references(value)
    least = min(counts.values(), default=0)
    kept = [facts(node).value for node, num in counts.items() if num > least and node in constant]
    return {id(tensor): tensor for tensor in kept}
