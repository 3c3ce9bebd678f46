"""One fx graph being written: its inputs, its calls, and what shows a recorded tensor in it.

A recorded node is shown by the tensors that are there: it is one of them, or the recorded chain of
views leads from one of them to it. Views that undo each other, and reshapes that the last one alone
can do, are not run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from rekindle.capture.node_facts import NO_STORAGE, NodeFacts, facts, set_facts
from rekindle.lower import fast_calls
from rekindle.lower.codegen import compile_boxed
from rekindle.lower.runtime_ops import clone_storage
from rekindle.program.program import Program
from rekindle.torch_compat import add_call, known_dense, known_equal

aten = torch.ops.aten
_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.detach.default})
# Of what has no tensor to look like. Facts are shared, not copied: that takes as long as a call.
_UNKNOWN = NodeFacts()


@dataclass(slots=True)
class Tensors:
    """Recorded nodes over one storage -> nodes of the graph being written."""

    roots: dict[fx.Node, fx.Node] = field(default_factory=dict)  # what owns the storage
    views: dict[fx.Node, fx.Node] = field(default_factory=dict)  # what was made of those


class GraphWriter:
    """Writes the nodes of a program into a new graph, in the order of a schedule."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self._first_call: fx.Node | None = None
        self._residents = Tensors()

    @property
    def residents(self) -> tuple[fx.Node, ...]:
        """The recorded placeholders that the graph reads, in the order of its last inputs."""
        return tuple(self._residents.roots)

    def finish(self, outs: Sequence[fx.Node]) -> tuple[Callable[[list[Any]], Any], str]:
        """The function of the graph, and its source."""
        self.graph.output(list(outs))
        return compile_boxed(self.graph, self.program.joint.changing)

    # ---- inputs and calls; `like` are the facts of a recorded node whose tensor looks like theirs

    def placeholder(self, name: str, like: NodeFacts = _UNKNOWN) -> fx.Node:
        node = self.graph.placeholder(name)
        set_facts(node, like)
        return node

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: NodeFacts = _UNKNOWN
    ) -> fx.Node:
        node = fast_calls.call(self.graph, target, args, kwargs)
        self._first_call = self._first_call or node
        set_facts(node, like)
        return node

    def method(self, thing: fx.Node, name: str, args: Sequence[Any]) -> fx.Node:
        """A call of a method of something that is no tensor."""
        node = add_call(self.graph, "call_method", name, (thing, *args), {})
        self._first_call = self._first_call or node
        set_facts(node, _UNKNOWN)
        return node

    def copied(self, tensors: Tensors) -> Tensors:
        """The same on a copy of the storage."""
        [(root, tensor)] = tensors.roots.items()
        return Tensors({root: self.call(clone_storage, (tensor,), {}, facts(root))})

    # ---- recorded tensors

    def storage(self, node: fx.Node) -> int:
        while (storage := facts(node).storage) == NO_STORAGE:
            node = self.program.base[node]
        return storage

    def resident(self, node: fx.Node) -> fx.Node:
        """A tensor over what is there all the time: an argument, parameter, buffer or constant."""
        base = node
        while base in self.program.base:
            base = self.program.base[base]
        inputs = self._residents.roots
        if base not in inputs:
            assert base.op == "placeholder", f"{base} is read before it is made"
            if self._first_call is None:
                inputs[base] = self.placeholder(base.name, facts(base))
            else:
                with self.graph.inserting_before(self._first_call):
                    inputs[base] = self.placeholder(base.name, facts(base))
        return self.view(node, self._residents)

    def view(self, node: fx.Node, tensors: Tensors) -> fx.Node:
        """`node` as a view of one of the roots, through the recorded chain of views."""
        roots, views = tensors.roots, tensors.views
        if node in roots:
            return roots[node]
        if node in views:
            return views[node]
        above = self.program.base.get(node)
        # Views that undo each other, such as a transpose of a transpose, are the tensor that they
        # began with.
        while above is not None:
            if _same_view(node, above):
                return self.view(above, tensors)
            above = None if above in roots else self.program.base.get(above)
        source = self._reshaped_from(node, roots)
        if source is not None:
            args: Any = (self.view(source, tensors), *node.args[1:])
        else:
            args = fx.node.map_arg(node.args, lambda a: self.view(a, tensors))
        out = self.call(node.target, args, dict(node.kwargs), facts(node))
        views[node] = out
        return out

    def _reshaped_from(self, node: fx.Node, roots: dict[fx.Node, fx.Node]) -> fx.Node | None:
        """For a reshape of reshapes: the tensor that the last one alone can start from."""
        if node.target is not aten.view.default:
            return None
        source = self.program.base.get(node)
        while source is not None and source not in roots and source.target in _RESHAPES:
            source = self.program.base.get(source)
        if source is None or not isinstance(facts(source).value, torch.Tensor):
            return None
        like, wanted = facts(source).value, facts(node).value
        if self.program.joint.changing is not None:
            # Of sizes that change a trial would tell for one call. A whole tensor in the order of
            # its dimensions has a view of any other shape.
            whole = all(known_dense(tensor) for tensor in (like, wanted))
            return source if whole and like.dtype == wanted.dtype else None
        # Tried on a meta tensor: whether a reshape is a view hangs on strides, and torch's own rule
        # is the one that counts. A copy here would be memory that no plan knows of.
        trial = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        try:
            fits = trial.view(wanted.shape).stride() == wanted.stride()
        except RuntimeError:
            return None
        return source if fits and like.dtype == wanted.dtype else None


def _same_view(node: fx.Node, other: fx.Node) -> bool:
    """Two nodes that show the same elements in the same way."""
    a, b = facts(node).value, facts(other).value
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return bool(
        known_equal(a.shape, b.shape)
        and known_equal(a.stride(), b.stride())
        and known_equal(a.storage_offset(), b.storage_offset())
        and a.dtype == b.dtype
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )
