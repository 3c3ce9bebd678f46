"""Inductor's wrappers of a forward and a backward -> a `JointGraph` whose nodes are kernel calls.

Placeholders, outputs and gradients mean what they meant in the recorded graph: what reads a joint
graph (`program`, `profile`, `lower`, `runtime`) need not know which kind it has.
"""

import ast
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from rekindle.capture import JointGraph
from rekindle.capture.node_facts import NO_STORAGE, NodeFacts, Phase, facts, set_facts
from rekindle.inductor.kernel_calls import (
    CallForm,
    Fresh,
    called,
    definition_of,
    draws,
    function_of,
    kernel_name,
    restrided,
    written_arguments,
)
from rekindle.inductor.wrapper import (
    Alias,
    Allocate,
    Clear,
    NotCompiled,
    Part,
    Run,
    Wrapper,
    method_of,
    view_source,
)
from rekindle.torch_compat import pytree, storage_bytes, storage_key

aten = torch.ops.aten

# Buffers that mean nothing from one kernel to the next. Semaphores that Inductor clears once per
# graph are left clear by each kernel; here each run of a kernel has its own.
_SCRATCH = ("workspace", "semaphores")


@dataclass(frozen=True, slots=True)
class View:
    """How a view lies in its buffer; the offset is counted from the buffer's own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A tensor of a wrapper: a buffer, or a view of it."""

    buffer: "Buffer"
    view: View | None = None


@dataclass(eq=False, slots=True)
class Buffer:
    """A buffer of a wrapper, and the node that makes it, once there is one."""

    node: fx.Node | None = None
    allocation: ast.Call | None = None  # until then
    cleared: bool = False
    scratch: bool = False  # each kernel that is given it gets one of its own


class KernelGraph:
    """A graph of kernel calls, written one wrapper after the other."""

    def __init__(self, joint: JointGraph, statistics: frozenset[fx.Node]) -> None:
        self.joint = joint
        self.statistics = statistics  # placeholders that a second run may leave alone
        self.graph = fx.Graph()
        self.phase: Phase = "forward"
        self.copies: dict[fx.Node, fx.Node] = {}
        self._storages: dict[int, int] = {}
        self._recorded = {node.name: node for node in joint.nodes}
        self._functions: dict[Any, Any] = {}
        self._number = -2  # of ops that belong to nothing recorded

    def placeholder(self, recorded: fx.Node) -> Shown:
        node = self.graph.placeholder(recorded.name)
        set_facts(node, facts(recorded))
        self.copies[recorded] = node
        self._storages.setdefault(storage_key(facts(node).value), facts(node).storage)
        return Shown(Buffer(node))

    def run(self, wrapper: Wrapper, scope: dict[str, Any], given: Sequence[Shown]) -> list[Any]:
        """Adds the calls of a wrapper; what it returns, None where that is no tensor."""
        names: dict[str, Shown] = dict(zip(wrapper.inputs, given, strict=True))
        wholes: dict[str, fx.Node] = {}  # results of several tensors
        scratches = _scratches(wrapper)
        for step in wrapper.steps:
            match step:
                case Allocate():
                    scratch = step.name in scratches
                    names[step.name] = Shown(Buffer(allocation=step.call, scratch=scratch))
                case Clear():
                    buffer = names[step.name].buffer
                    if buffer.node is not None:
                        raise NotCompiled("Inductor's wrapper clears a buffer that is in use")
                    buffer.cleared = True
                case Alias():
                    names[step.name] = _shown(step.shown, names)
                case Part():
                    names[step.name] = self._part(wholes[step.whole], step.index)
                case Run():
                    made = self._run(step, wrapper, scope, names)
                    if step.result is not None:
                        wholes[step.result] = made
                        names[step.result] = Shown(Buffer(made))
        return [None if isinstance(r, ast.Constant) else _shown(r, names) for r in wrapper.results]

    # ---- calls

    def _run(
        self, step: Run, wrapper: Wrapper, scope: dict[str, Any], names: dict[str, Shown]
    ) -> fx.Node:
        call = step.call
        method = method_of(call)
        if method is not None and method[0] in names:
            target: Any = None
            kernel = method[1]
        else:
            target, kernel, method = called(call, scope), kernel_name(call), None
        taken = _TensorsOut(names)
        text = ast.unparse(taken.visit(_copy(call)))
        if method is not None:
            written = {names[method[0]].buffer} if kernel.endswith("_") else set()
        else:
            written = {
                names[n.id].buffer
                for argument in written_arguments(call, target, wrapper.kernels)
                for n in ast.walk(argument)
                if isinstance(n, ast.Name) and n.id in names
            }
        made = [b for b in taken.buffers if b.node is None]
        given = [b for b in taken.buffers if b.node is not None]
        if step.result is not None and made:
            raise NotCompiled(f"{kernel} writes into a buffer and gives one back")
        positions = tuple([i for i, b in enumerate(given) if b in written])
        form = CallForm(
            kernel=kernel,
            definition=definition_of(call, wrapper.kernels),
            params=tuple([taken.buffers[b] for b in given]),
            fresh=tuple(
                [Fresh(taken.buffers[b], _text(b.allocation), b.cleared, b.scratch) for b in made]
            ),
            call=text,
            has_result=step.result is not None,
            written=positions,
            statistics={
                i: _blank(facts(given[i].node).value)
                for i in positions
                if self._is_statistic(given[i].node)
            },
            is_random=draws(target),
        )
        made = [b for b in made if not b.scratch]
        key = (id(scope), repr(form))
        if key not in self._functions:
            self._functions[key] = function_of(form, scope)
        args = tuple([b.node for b in given])
        writes = tuple([b.node for i, b in enumerate(given) if i in positions])
        values = [_fake(b.allocation, self.joint) for b in made]
        if step.result is not None:
            value = self._result(form, scope, args)
        elif len(made) == 1:
            value = values[0]
        else:
            value = tuple(values) or None
        node = self.graph.call_function(self._functions[key], args)
        self._describe(node, value, writes, self._origin(step.origins))
        if len(made) == 1:
            made[0].node = node
        for i, buffer in enumerate(made if len(made) > 1 else ()):
            buffer.node = self._part(node, i).buffer.node
        return node

    def _result(self, form: CallForm, scope: dict[str, Any], args: tuple[Any, ...]) -> Any:
        """What a call gives back, without data."""
        on_fakes = {**scope, "reinterpret_tensor": _fake_view}
        mode = self.joint.session.recorder.fake_mode
        with torch.no_grad(), mode:
            return function_of(form, on_fakes)(*[facts(a).value for a in args])

    def _is_statistic(self, node: fx.Node | None) -> bool:
        return node in {self.copies.get(s) for s in self.statistics}

    def _part(self, whole: fx.Node, index: int) -> Shown:
        for user in whole.users:
            if user.target is operator.getitem and user.args[1] == index:
                return Shown(Buffer(user))
        node = self.graph.call_function(operator.getitem, (whole, index))
        self._describe(node, facts(whole).value[index], (), facts(whole))
        return Shown(Buffer(node))

    def _origin(self, names: Sequence[str]) -> NodeFacts | None:
        """Of the recorded nodes that a kernel computes, the last one of the phase: it stands for
        the kernel where modules, lines and pairs of forward and backward are told."""
        known = [facts(self._recorded[n]) for n in names if n in self._recorded]
        return next((f for f in reversed(known) if f.phase == self.phase), None)

    def _describe(
        self,
        node: fx.Node,
        value: Any,
        writes: tuple[fx.Node, ...],
        like: NodeFacts | None = None,
    ) -> None:
        storage, num_bytes = NO_STORAGE, 0
        if isinstance(value, torch.Tensor):
            new_storage = self.joint.session.recorder.new_storage
            key = storage_key(value)
            if key not in self._storages:
                self._storages[key] = new_storage()
            elif node.target is operator.getitem:
                raise NotCompiled(f"{node.args[0]} gives back two tensors that share memory")
            storage, num_bytes = self._storages[key], storage_bytes(value)
        if like is None:
            self._number -= 1
            like = NodeFacts(sequence_nr=self._number)
        known = (self.phase, like.sequence_nr, like.module, like.where)
        set_facts(node, NodeFacts(value, storage, num_bytes, writes, *known))

    # ---- what leaves

    def node_of(self, shown: Shown) -> fx.Node:
        """The node of a tensor: of its buffer, or of a view that is made of it."""
        root = shown.buffer.node
        if root is None:
            raise NotCompiled("Inductor's wrapper returns a buffer that nothing was written to")
        if shown.view is None:
            return root
        value, view = facts(root).value, shown.view
        args = (root, list(view.size), list(view.stride), value.storage_offset() + view.offset)
        return self._view(aten.as_strided.default, args)

    def _view(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        node = self.graph.call_function(target, args)
        with torch.no_grad(), self.joint.session.recorder.fake_mode:
            value = target(facts(args[0]).value, *args[1:])
        self._describe(node, value, ())
        return node

    def clone(self, node: fx.Node) -> fx.Node:
        """A tensor of its own, where two results must not share one."""
        return self._view(aten.clone.default, (node,))

    def shown_like(self, root: fx.Node, like: torch.Tensor) -> fx.Node:
        """A view of a tensor that lies as the recorded one does in its storage."""
        args = (root, list(like.shape), list(like.stride()), like.storage_offset())
        return self._view(aten.as_strided.default, args)

    def laid_out(self, node: fx.Node, like: torch.Tensor) -> fx.Node:
        """A copy that lies in memory as the recorded tensor does."""
        return self._view(restrided, (node, list(like.stride())))

    def copied(self, recorded: fx.Node) -> fx.Node:
        """A recorded view of placeholders."""
        if recorded not in self.copies:
            args, kwargs = fx.node.map_arg((recorded.args, recorded.kwargs), self.copied)
            node = self.graph.call_function(recorded.target, args, kwargs)
            set_facts(node, replace(facts(recorded), writes=()))
            self.copies[recorded] = node
        return self.copies[recorded]


def _scratches(wrapper: Wrapper) -> set[str]:
    """Workspaces that only kernels are given: what others read is a result like any other."""
    found = {
        step.name
        for step in wrapper.steps
        if isinstance(step, Allocate) and step.name.startswith(_SCRATCH)
    }
    for step in wrapper.steps:
        if isinstance(step, Run) and not ast.unparse(step.call.func).endswith(".run"):
            found -= {n.id for n in ast.walk(step.call) if isinstance(n, ast.Name)}
    return found


class _TensorsOut(ast.NodeTransformer):
    """Puts parameters in the place of the tensors of a call."""

    def __init__(self, names: dict[str, Shown]) -> None:
        self.names = names
        self.buffers: dict[Buffer, str] = {}  # in order of appearance -> its parameter

    def visit_Name(self, node: ast.Name) -> ast.AST:
        shown = self.names.get(node.id)
        if shown is None:
            # The stream of the moment: work may be issued to another one than when it was compiled.
            if node.id.startswith("stream") and node.id[6:].isdigit():
                return ast.parse(f"get_raw_stream({node.id[6:]})", mode="eval").body
            return node
        name = self.buffers.setdefault(shown.buffer, f"t{len(self.buffers)}")
        if shown.view is None:
            return ast.Name(name, ast.Load())
        view = shown.view
        text = f"reinterpret_tensor({name}, {view.size}, {view.stride}, {view.offset})"
        return ast.parse(text, mode="eval").body

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # A view of a view is one view of the buffer.
        if view_source(node) is not None:
            shown = _shown(node, self.names)
            name = self.buffers.setdefault(shown.buffer, f"t{len(self.buffers)}")
            view = shown.view
            if view is None:
                return ast.Name(name, ast.Load())
            text = f"reinterpret_tensor({name}, {view.size}, {view.stride}, {view.offset})"
            return ast.parse(text, mode="eval").body
        self.generic_visit(node)
        return node


def _shown(expr: ast.expr, names: dict[str, Shown]) -> Shown:
    """What an expression of a wrapper shows."""
    if isinstance(expr, ast.Name) and expr.id in names:
        return names[expr.id]
    source = view_source(expr)
    if source is None or not isinstance(expr, ast.Call):
        raise NotCompiled(f"Inductor's wrapper shows {ast.unparse(expr)[:80]}")
    inner = _shown(source, names)
    if len(expr.args) == 1:
        return inner
    size, stride, offset = (ast.literal_eval(a) for a in expr.args[1:])
    begin = 0 if inner.view is None else inner.view.offset
    return Shown(inner.buffer, View(tuple(size), tuple(stride), begin + offset))


def _copy(call: ast.Call) -> ast.Call:
    parsed = ast.parse(ast.unparse(call), mode="eval").body
    assert isinstance(parsed, ast.Call)
    return parsed


def _text(allocation: ast.Call | None) -> str:
    assert allocation is not None
    return ast.unparse(allocation)


def _fake(allocation: ast.Call | None, joint: JointGraph) -> torch.Tensor:
    """The tensor of an allocation, without data."""
    assert allocation is not None
    if isinstance(allocation.func, ast.Attribute):
        room = _fake(allocation.func.value, joint)  # type: ignore[arg-type]
        size, stride = (ast.literal_eval(a) for a in allocation.args)
        with joint.session.recorder.fake_mode:
            return torch.as_strided(room, size, stride)
    assert isinstance(allocation.func, ast.Name)
    device = allocation.func.id.removeprefix("empty_strided_")
    keywords = {k.arg: k.value for k in allocation.keywords}
    if device not in ("cpu", "cuda") or keywords or len(allocation.args) != 3:
        raise NotCompiled(f"Inductor's wrapper allocates with {ast.unparse(allocation)[:80]}")
    size, stride = (ast.literal_eval(a) for a in allocation.args[:2])
    dtype = getattr(torch, ast.unparse(allocation.args[2]).removeprefix("torch."))
    where = joint.device if joint.device.type == device else torch.device(device)
    with joint.session.recorder.fake_mode:
        return torch.empty_strided(size, stride, dtype=dtype, device=where)


def _blank(value: torch.Tensor) -> str:
    """The call of the wrapper's that allocates such a tensor."""
    size, stride = tuple(value.shape), tuple(value.stride())
    return f"empty_strided_{value.device.type}({size}, {stride}, {value.dtype})"


def _fake_view(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of what a node stands for."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
