"""A recorded `JointGraph` -> the functional graph that Inductor compiles.

The recorded ops run once more on fake tensors, in order, and are written down without in-place
ops. What the forward writes to (running statistics, counters) is worked on in a copy; its
last state is one more output, written back when the graph is cut in two (`compilation`).
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rekindle.capture import JointGraph, op_effects
from rekindle.capture.node_facts import facts, source_of
from rekindle.capture.random_streams import own_generator
from rekindle.inductor.wrapper import NotCompiled
from rekindle.torch_compat import (
    functional_trace,
    is_overload,
    symbol_free_fake_mode,
    trace_as,
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Functional:
    """A joint graph without in-place ops: placeholders `primals_*` and `tangents_*`; outputs are
    the last states of what is written to, the model's outputs, and the gradients."""

    graph: fx.GraphModule
    mode: Any  # of the fake tensors
    inputs: tuple[torch.Tensor, ...]  # fake, as the graph counts its placeholders
    primals: tuple[fx.Node, ...]  # recorded placeholders
    tangents: tuple[fx.Node, ...]
    written: tuple[fx.Node, ...]  # recorded placeholders that the forward writes to
    outputs: tuple[fx.Node, ...]  # recorded nodes: what the forward returns
    gradients: tuple[fx.Node, ...]  # recorded nodes: what the backward returns


def functional(joint: JointGraph) -> Functional:
    """The functional graph of a recorded one. Raises NotCompiled."""
    placeholders = [n for n in joint.nodes if n.op == "placeholder"]
    primals = tuple([n for n in placeholders if source_of(n).kind != "tangent"])
    tangents = tuple([n for n in placeholders if source_of(n).kind == "tangent"])
    written = _written(joint, primals)
    outputs = _returned(joint)
    gradients = tuple(dict.fromkeys([made for _, made in joint.gradients]))
    mode = symbol_free_fake_mode()

    changed = {_storage(n) for node in joint.nodes for n in facts(node).writes}

    def run(primals_: Sequence[Any], tangents_: Sequence[Any]) -> list[Any]:
        values = dict(zip((*primals, *tangents), (*primals_, *tangents_), strict=True))
        for node in written:
            values[node] = values[node].clone()
        for node in joint.nodes:
            if node.op != "placeholder":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                trace_as(node.name)
                values[node] = _run(node, args, kwargs, changed)
        return [values[n] for n in (*written, *outputs, *gradients)]

    def call(primals: Any, tangents: Any) -> list[Any]:
        return run(primals, tangents)

    with mode:
        fakes = [_like(facts(n).value) for n in (*primals, *tangents)]
        graph = functional_trace(call, fakes[: len(primals)], fakes[len(primals) :])
    return Functional(graph, mode, tuple(fakes), primals, tangents, written, outputs, gradients)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _written(joint: JointGraph, primals: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The placeholders that the forward writes to. Raises NotCompiled where the order of writes
    and reads would not be the recorded one."""
    forward = {facts(n).storage for n in primals}
    for node in joint.nodes:
        if node.op == "placeholder":
            continue
        if not is_overload(node.target) and node.target is not operator.getitem:
            raise NotCompiled(f"{node.target} is not an op of torch")
        if op_effects.runs_once(node.target):
            raise NotCompiled(f"{node.target} is a collective")
        if own_generator(node) is not None:
            raise NotCompiled(f"{node.target} draws from a generator of the model's own")
        known = facts(node)
        if known.phase == "forward":
            forward.add(known.storage)
        elif any(_storage(n) in forward for n in known.writes):
            raise NotCompiled(f"{node.target} writes in the backward to what the forward made")
    storages = {_storage(n) for node in joint.nodes for n in facts(node).writes}
    found = [n for n in primals if facts(n).storage in storages]
    for node in found:
        if sum(facts(n).storage == facts(node).storage for n in primals) > 1:
            raise NotCompiled(f"{source_of(node).name} is written to and shares its memory")
    return tuple(found)


def _storage(node: fx.Node) -> int:
    """The storage that a node shows, through in-place ops, which give back their argument."""
    while facts(node).storage < 0 and facts(node).writes:
        node = facts(node).writes[0]
    return facts(node).storage


def _returned(joint: JointGraph) -> tuple[fx.Node, ...]:
    """What the forward returns for the model's outputs: each where it has a storage of its own,
    else what owns the storage that several of them show. None of what shows an argument."""
    resident = {facts(n).storage for n in joint.nodes if n.op == "placeholder"}
    shown: dict[int, list[fx.Node]] = {}
    for node in joint.outputs:
        storage = _storage(node)
        if storage not in resident and node not in shown.setdefault(storage, []):
            shown[storage].append(node)
    found = []
    for storage, nodes in shown.items():
        if len(nodes) == 1:
            found.append(nodes[0])
        else:
            found.append(next(n for n in joint.nodes if facts(n).storage == storage))
    return tuple(found)


# ---- ops that hide a write, or a draw that Inductor could make itself


def _run(node: fx.Node, args: Any, kwargs: Any, changed: set[int]) -> Any:
    """One recorded call. `changed`: the storages that are written to at some time."""
    if node.target in _BY_STRIDES and not _has_strides(args[0], facts(node.args[0]).value):
        # A decomposition may lay its result out in another way than eager's kernel.
        if node.target is aten.as_strided.default or _storage(node) in changed:
            raise NotCompiled(f"{node.target} depends on how {node.args[0]} lies in memory")
        return args[0].reshape(args[1])
    special: Callable[..., Any] | None = _SPECIAL.get(node.target)
    if special is not None:
        return special(*args, **kwargs)
    if op_effects.statistics_positions(node):
        raise NotCompiled(f"{node.target} writes to running statistics")
    target: Any = node.target
    return target(*args, **kwargs)


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: Any, eps: float
) -> Any:
    """Running statistics are written by an op whose schema does not say so."""
    if not training or mean is None or var is None:
        return aten.native_batch_norm.default(x, weight, bias, mean, var, training, momentum, eps)
    made = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, mean, var, training, momentum, eps
    )
    mean.copy_(made[3])
    var.copy_(made[4])
    return made[:3]


def _cudnn_batch_norm(*args: Any) -> Any:
    return (*_batch_norm(*args), args[0].new_empty(0, dtype=torch.uint8))


def _cudnn_batch_norm_backward(
    x: Any,
    grad: Any,
    weight: Any,
    mean: Any,
    var: Any,
    save_mean: Any,
    save_var: Any,
    eps: float,
    _reserve: Any,
) -> Any:
    return aten.native_batch_norm_backward.default(
        grad, x, weight, mean, var, save_mean, save_var, True, eps, [True, True, True]
    )


def _bernoulli_(x: Any, p: float = 0.5) -> Any:
    """Dropout's mask on a CPU: as a number that is drawn by a kernel, which fuses."""
    return x.copy_(torch.rand_like(x, dtype=torch.float32) < p)


def _has_strides(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    return bool(
        tensor.stride() == like.stride() and tensor.storage_offset() == like.storage_offset()
    )


_BY_STRIDES = frozenset({aten.view.default, aten._unsafe_view.default, aten.as_strided.default})
_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: _batch_norm,
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    aten.bernoulli_.float: _bernoulli_,
}
