"""A call that was read -> `JointGraph`: every op of one forward and backward, as eager runs it.

The graph of torch calls that the front door found runs once on fake tensors, under the
autograd engine, and a recorder below autograd writes down each op (see `recorder`). Nothing is
decomposed, functionalized or compiled: the kernels, their order and the in-place ops are eager's
own.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from rekindle.capture.autocast import autocast_as
from rekindle.capture.autograd_marks import refuse_marks, shown_arguments
from rekindle.capture.changing_sizes import ChangingSizes, changing_sizes
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.capture.graph_follower import Follower
from rekindle.capture.graph_text import graph_text
from rekindle.capture.node_facts import Source, facts, source_of
from rekindle.capture.recorder import Recorder, Scalar
from rekindle.errors import CaptureError, NothingToPlan
from rekindle.torch_compat import (
    GraphInput,
    eager_layouts_answered,
    every_decision_noted,
    is_overload,
    outputs_below,
    outside_modes,
    pytree,
    storage_key,
    told_without_nodes,
)


@dataclass(frozen=True, slots=True)
class Tangent:
    """The layout that the gradient of one output is assumed to arrive in."""

    output: int  # among the output tensors
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """What a capture leaves open: the forward's autograd graph, over fake tensors, from
    which the backward of any choice of outputs can be recorded later."""

    recorder: Recorder
    outputs: tuple[torch.Tensor, ...]
    leaves: tuple[torch.Tensor, ...]
    forward_nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a rewritten graph was made from."""

    recorded: "JointGraph"
    copies: dict[fx.Node, fx.Node]  # of recorded nodes, in the graph that was worked on
    forward_nodes: tuple[fx.Node, ...]  # as the passes left them


@dataclass(frozen=True, slots=True)
class JointGraph:
    """The fx nodes of a step with what its placeholders and results mean; holds torch objects."""

    nodes: tuple[fx.Node, ...]  # placeholders and calls, in eager's order
    device: torch.device
    entries: tuple[fx.Node | None, ...]  # placeholders, as the call's graph counts its inputs
    constants: tuple[torch.Tensor, ...]
    outputs: tuple[fx.Node, ...]  # as the call's graph counts them
    differentiable: tuple[bool, ...]  # per output: whether eager would give it a grad_fn
    tangents: tuple[Tangent, ...]  # the outputs whose gradient is assumed to arrive
    autocast: tuple[Any, ...]  # what is on while the backward runs
    gradients: tuple[tuple[fx.Node, fx.Node], ...]  # (placeholder, node of its gradient)
    idle: tuple[fx.Node, ...]  # placeholders that get a gradient from other outputs only
    scalars: tuple[Scalar, ...]  # asked of the nodes that were recorded
    session: Session
    arrivals: tuple[int, ...] = ()  # entries, in the order in which their gradients were finished
    origin: Origin | None = None  # None: as it was recorded
    kernels: Literal["eager", "inductor"] = "eager"  # what its nodes call
    changing: ChangingSizes | None = None  # sizes that are symbols; None: all are as captured
    # Which inputs, as the call's graph counts them, forward makes to require grad.
    made_to_require: tuple[int, ...] = ()
    marked: tuple[int, ...] = ()  # the outputs that forward itself calls retain_grad() on
    # Outputs whose whole gradient leaves the backward for their `.grad`: other outputs are computed
    # from these, so that autograd sees only the part that comes from outside.
    retained: tuple[int, ...] = ()

    def __str__(self) -> str:
        return graph_text(self.nodes, self.outputs, self.gradients)

    @property
    def recorded(self) -> "JointGraph":
        """The graph of what eager ran, before any rewrite."""
        return self if self.origin is None else self.origin.recorded

    @property
    def forward_only(self) -> bool:
        """Whether no backward was recorded, as under no_grad."""
        return not self.tangents

    def inputs_of(self, other: "JointGraph") -> tuple[int | None, ...]:
        """Which input of the call's graph each input of the other's is, of a graph that is like
        this one; None of those that no op reads. Each reading counts them in an order of its own.
        """
        number = {node: i for i, node in enumerate(self.nodes)}
        found = {number[node]: i for i, node in enumerate(self.entries) if node is not None}
        number = {node: i for i, node in enumerate(other.nodes)}
        return tuple([None if n is None else found[number[n]] for n in other.entries])

    @property
    def inner_outputs(self) -> set[int]:
        """The outputs that other outputs are computed from."""
        outputs = self.recorded.session.outputs
        return outputs_below([t for t in outputs if t.requires_grad], outputs)

    @property
    def differentiated(self) -> tuple[torch.Tensor, ...]:
        """Tensors like the outputs whose gradient is assumed to arrive."""
        return tuple(facts(self.outputs[t.output]).value for t in self.tangents)

    def is_like(self, other: "JointGraph") -> bool:
        """Whether both are the same ops on the same tensors, in the same order."""
        if self._account() != other._account():
            return False
        pairs = zip(self.constants, other.constants, strict=True)
        return all(a is b or torch.equal(a, b) for a, b in pairs)

    def _account(self) -> tuple[Any, ...]:
        number = {node: i for i, node in enumerate(self.nodes)}

        def told(leaf: Any) -> Any:
            return ("node", number[leaf]) if isinstance(leaf, fx.Node) else (type(leaf), repr(leaf))

        calls = []
        for node in self.nodes:
            leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
            source = facts(node).source
            name = str(node.target)
            if not is_overload(node.target):
                name = getattr(node.target, "__name__", name)
            whose = getattr(node.target, "identity", None)  # of a hook
            calls.append((node.op, name, whose, source, spec, tuple(map(told, leaves))))
        return (
            tuple(calls),
            tuple([(t.shape, t.dtype) for t in self.constants]),
            tuple([number[n] for n in self.outputs]),
            tuple([(number[a], number[b]) for a, b in self.gradients]),
            tuple([(str(s.target), repr(s.value), s.num_before) for s in self.scalars]),
            len(self.made_to_require),
        )

    def with_tangents(
        self,
        tangents: Sequence[Tangent],
        autocast: tuple[Any, ...] = (),
        retained: tuple[int, ...] = (),
    ) -> "JointGraph":
        """The recorded forward with another recorded backward: gradients arrive for other outputs,
        in other layouts, or inside autocast, which casts the backward's own ops. Of the outputs
        `retained` the whole gradient is wanted."""
        joint = replace(self.recorded, autocast=autocast, retained=retained)
        with contextlib.ExitStack() as stack:
            stack.enter_context(collector_at_rest())
            stack.enter_context(outside_modes())
            stack.enter_context(eager_layouts_answered())
            stack.enter_context(self.session.recorder.fake_mode)
            if self.changing is not None:
                stack.enter_context(every_decision_noted(self.changing.symbols))
            return _with_backward(joint, tuple(tangents))


def capture(
    follower: Follower, graph: fx.GraphModule, inputs: Sequence[GraphInput], symbols: Any = None
) -> JointGraph:
    """The joint graph of a call that was read, on inputs like these. `symbols`: of their sizes,
    where some change.

    Under `torch.no_grad()` the forward alone. Gradients are assumed to arrive for the loss where
    there is one (an output called so, or a scalar), else for every output that requires grad;
    `JointGraph.with_tangents` records the backward of another choice.
    """
    with collector_at_rest():
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        given = {n: (i.value, i.stand_in) for n, i in zip(placeholders, inputs, strict=True)}
        attributes = dict(graph.named_children()) | vars(graph)
        follower.follow(graph.graph, attributes, given.__getitem__, symbols)
        joint = _joint(follower, graph.graph, placeholders)
        if symbols is not None:
            joint = replace(joint, changing=changing_sizes(symbols, inputs))
        if not follower.with_gradients:
            return joint
        if not joint.session.leaves or not any(joint.differentiable):
            raise NothingToPlan(
                "nothing requires grad: no parameter or input that an output depends on has "
                "requires_grad=True; for inference call this under torch.no_grad()"
            )
        tangents = _default_tangents(follower, joint.session.outputs)
        inner = joint.inner_outputs if joint.marked else set()
        retained = tuple([i for i in joint.marked if i in inner])
        return joint.with_tangents(tangents, retained=retained)


def _joint(follower: Follower, graph: fx.Graph, placeholders: Sequence[fx.Node]) -> JointGraph:
    """The forward alone."""
    recorder = follower.recorder
    if not any(node.op == "call_function" for node in recorder.graph.nodes):
        raise NothingToPlan(
            "the model runs no ops: there is nothing to plan; give a model that computes"
        )
    result = next(n for n in graph.nodes if n.op == "output").args[0]
    made = [follower.value(n) for n in result]
    for node in follower.entries.values():
        if recorder.moved(node):
            source = source_of(node)
            raise CaptureError(
                f"forward gives {source.kind} {source.name} other data (`.data = ...`), which a "
                "plan cannot repeat; write into it with copy_()"
            )
    given = [facts(n).value for n in follower.entries.values()]
    refuse_marks(recorder, given, follower.leaves)
    nodes = tuple(recorder.graph.nodes)
    return JointGraph(
        nodes=nodes,
        device=follower.device(),
        entries=tuple([follower.entries.get(n) for n in placeholders]),
        constants=tuple(recorder.constants),
        outputs=tuple([recorder.node_of(t) for t in made]),
        differentiable=tuple([t.requires_grad for t in made]),
        tangents=(),
        autocast=(),
        gradients=(),
        idle=(),
        scalars=tuple(recorder.scalars),
        session=Session(recorder, tuple(made), tuple(follower.leaves), nodes),
        made_to_require=tuple([placeholders.index(n) for n in follower.made_to_require]),
        marked=tuple([i for i, t in enumerate(made) if t.retains_grad]),
    )


def _with_backward(joint: JointGraph, tangents: tuple[Tangent, ...]) -> JointGraph:
    session = joint.session
    recorder, outputs, leaves = session.recorder, session.outputs, session.leaves
    num_before = len(recorder.graph.nodes)
    recorder.phase = "backward"
    grads = []
    for i, tangent in enumerate(tangents):
        out = outputs[tangent.output]
        fake = torch.empty_strided(out.shape, tangent.stride, dtype=out.dtype, device=out.device)
        recorder.placeholder(fake, Source("tangent", f"grad of output {tangent.output}", i), None)
        grads.append(fake)
    owners: set[int] = set()
    arrived: list[fx.Node] = []
    hooks = [
        leaf.register_hook(_as_stored(leaf, owners, arrived, recorder.node_of(leaf)))
        for leaf in leaves
    ]
    roots = [outputs[t.output] for t in tangents]
    try:
        one_thread = torch.autograd.set_multithreading_enabled(False)  # as eager on a CPU
        plainly = told_without_nodes(CaptureError)
        with plainly, autocast_as(joint.autocast), one_thread, recorder:
            wanted = [*leaves, *(outputs[i] for i in joint.retained)]
            found = torch.autograd.grad(roots, wanted, grads, allow_unused=True, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
        recorder.drop_retained_gradients()
    gradients = tuple(
        (recorder.node_of(leaf), recorder.node_of(gradient))
        for leaf, gradient in zip(wanted, found, strict=True)
        if gradient is not None
    )
    known = {leaf for leaf, _ in gradients}
    reached = reachable_leaves([t for t in outputs if t.requires_grad])
    idle = [recorder.node_of(leaf) for leaf in leaves if id(leaf) in reached]
    return replace(
        joint,
        nodes=(*session.forward_nodes, *tuple(recorder.graph.nodes)[num_before:]),
        constants=tuple(recorder.constants),
        tangents=tangents,
        gradients=gradients,
        idle=tuple(node for node in idle if node not in known),
        arrivals=tuple([joint.entries.index(n) for n in arrived if n in joint.entries]),
    )


def reachable_leaves(outputs: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the leaf tensors that some output's autograd graph ends in."""
    found: set[int] = set()
    stack: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
    found.update(id(t) for t in outputs if t.grad_fn is None)
    seen = set(stack)
    while stack:
        node = stack.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)
    return found


def _as_stored(
    leaf: torch.Tensor, owners: set[int], arrived: list[fx.Node], node: fx.Node
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A gradient as `.grad` will hold it. Eager copies one that has not the parameter's layout or
    that somebody else holds; the copy stands in the graph, where the plan can count it."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        arrived.append(node)
        if gradient.layout is not torch.strided:
            return gradient
        key = storage_key(gradient)
        strides_match = gradient.stride() == leaf.stride() or all(
            a == b or size == 1
            for a, b, size in zip(gradient.stride(), leaf.stride(), leaf.shape, strict=True)
        )
        whole = gradient.numel() * gradient.element_size() == gradient.untyped_storage().nbytes()
        if strides_match and not (whole and key in owners):
            owners.add(key)
            return gradient
        copy = torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=gradient.dtype, device=gradient.device
        )
        copy.copy_(gradient)
        owners.add(storage_key(copy))
        return copy

    return hook


def _default_tangents(follower: Follower, tensors: Sequence[torch.Tensor]) -> tuple[Tangent, ...]:
    """Gradients arrive for the loss, where the call returns one that is called so; else for all
    scalars, where it returns one (what forward stores beside it may be a part of the loss); else
    for all outputs."""
    shown = shown_arguments(follower.recorder, tensors)
    able = [i for i, t in enumerate(tensors) if t.requires_grad and t.grad_fn is not None]
    able = [i for i in able if i not in shown]
    if not able:
        raise NothingToPlan("no output of the model is computed from what requires grad")

    def among(nodes: Sequence[fx.Node]) -> list[int]:
        values = {id(follower.values[n]) for n in nodes if n in follower.values}
        return [i for i in able if id(tensors[i]) in values]

    returned = among(follower.returned)
    wanted = among(follower.losses)
    if not wanted and any(tensors[i].dim() == 0 for i in returned):
        stored = set(able) - set(returned)
        first = next(i for i in returned if tensors[i].dim() == 0)
        wanted = [i for i in able if i == first or (i in stored and tensors[i].dim() == 0)]
    return tuple(Tangent(i, dense_stride(tensors[i])) for i in wanted or able)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own layout if it is dense, else the contiguous one."""
    expected = 1
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)))
    for d in order:
        if tensor.size(d) != 1:
            if tensor.stride(d) != expected:
                return tuple(torch.empty(tensor.shape, device="meta").stride())
            expected *= tensor.size(d)
    return tuple(tensor.stride())
