"""model + sample -> `JointGraph`: every op of one forward and backward, as eager runs it.

The model's own `forward` runs once on fake tensors, under the autograd engine, and a
recorder below autograd writes down each op (see `record`). Nothing is decomposed, functionalized
or compiled, and the model is not told that it is being compiled: the kernels, their order and the
in-place ops are eager's own. Where the model's code cannot run so, Dynamo reads it (see `dynamo`).
The model is left as it was: parameters, buffers, plain attributes, random streams (see `state`).
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from rekindle.capture import cudnn_rnn
from rekindle.capture.autocast import autocast_as, autocast_state
from rekindle.capture.dynamo_route import run_read
from rekindle.capture.eager_check import difference, explained, run_eagerly
from rekindle.capture.fake_tensors import fake_tensors_answer, libraries_see_real_tensors
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.capture.graph_text import graph_text
from rekindle.capture.module_state import fill_tables, left_as_it_was, module_paths, settle
from rekindle.capture.node_facts import Source, facts
from rekindle.capture.pytrees import Structure, split
from rekindle.capture.recorder import Recorder, Scalar, Unseen
from rekindle.capture.sample import Sample, placeholders
from rekindle.errors import CaptureError, NothingToPlan
from rekindle.torch_compat import (
    is_overload,
    new_fake_mode,
    outside_modes,
    pytree,
    recurrent_layers_call,
    run_saved_regions_plainly,
    storage_key,
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
    parameters: tuple[str, ...]  # names, as `sources` of kind "parameter" count them
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]
    outputs: tuple[fx.Node, ...]  # the distinct output tensors
    output_structure: Structure  # of a pair: what forward returns, and the list of `attributes`
    attributes: tuple[tuple[str, str], ...]  # module paths and names that forward sets to tensors
    differentiable: tuple[bool, ...]  # per output: whether eager would give it a grad_fn
    tangents: tuple[Tangent, ...]  # the outputs whose gradient is assumed to arrive
    autocast: tuple[Any, ...]  # what is on while the backward runs
    gradients: tuple[tuple[fx.Node, fx.Node], ...]  # (placeholder, node of its gradient)
    idle: tuple[fx.Node, ...]  # placeholders that get a gradient from other outputs only
    scalars: tuple[Scalar, ...]  # asked of the nodes that were recorded
    session: Session
    origin: Origin | None = None  # None: as it was recorded

    def __str__(self) -> str:
        return graph_text(self.nodes, self.outputs, self.gradients)

    @property
    def recorded(self) -> "JointGraph":
        """The graph of what eager ran, before any rewrite."""
        return self if self.origin is None else self.origin.recorded

    @property
    def forward_only(self) -> bool:
        return not self.tangents

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
            calls.append((node.op, name, source, spec, tuple(map(told, leaves))))
        return (
            tuple(calls),
            tuple([(t.shape, t.dtype) for t in self.constants]),
            tuple([number[n] for n in self.outputs]),
            self.output_structure.key,
            self.attributes,
            tuple([(number[a], number[b]) for a, b in self.gradients]),
            tuple([(str(s.target), repr(s.value), s.num_before) for s in self.scalars]),
        )

    def with_tangents(
        self, tangents: Sequence[Tangent], autocast: tuple[Any, ...] = ()
    ) -> "JointGraph":
        """The recorded forward with another recorded backward: gradients arrive for other outputs,
        in other layouts, or inside autocast, which casts the backward's own ops."""
        with collector_at_rest(), outside_modes(), self.session.recorder.fake_mode:
            return _with_backward(replace(self.recorded, autocast=autocast), tuple(tangents))


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    call: Callable[..., Any] | None = None,
) -> JointGraph:
    """The joint graph of `model.forward(*args, **kwargs)`, or of `call(model, *args, **kwargs)`.

    Under `torch.no_grad()` the forward alone. Gradients are assumed to arrive for the loss where
    there is one (an output called so, or a scalar), else for every output that requires grad;
    `JointGraph.with_tangents` records the backward of another choice.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(model).__name__}: {str(model)[:60]}")
    with collector_at_rest():
        return _captured(Sample(model, tuple(args), dict(kwargs or {}), call or _forward))


def _captured(sample: Sample) -> JointGraph:
    traced = _traced(sample)
    joint = _joint(sample, traced)
    if not torch.is_grad_enabled():
        return joint
    if not joint.session.leaves or not any(joint.differentiable):
        raise NothingToPlan(
            "nothing requires grad: no parameter or input that an output depends on has "
            "requires_grad=True; for inference call this under torch.no_grad()"
        )
    return joint.with_tangents(_default_tangents(traced.out, joint.session.outputs))


def _forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model.forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _Traced:
    """A forward that was recorded."""

    recorder: Recorder
    leaves: tuple[torch.Tensor, ...]
    out: Any
    attributes: dict[tuple[str, str], torch.Tensor]


def _traced(sample: Sample) -> _Traced:
    """The forward by the direct route, or by reading the model's code where it fails."""
    try:
        return _trace(sample, read=False)
    except Unseen as error:
        direct: Exception = error
    except CaptureError:
        raise  # the recorder saw it all and refuses
    except Exception as error:
        direct = error
    refusal = explained(direct)
    try:
        eager = run_eagerly(sample)  # an error of the model itself comes from here
    except torch.OutOfMemoryError:
        raise CaptureError(refusal) from direct
    try:
        traced = _trace(sample, read=True)
    except Exception as error:
        second = " ".join(str(error).split())[:200]
        raise CaptureError(f"{refusal} (reading its code does not help: {second})") from direct
    why = difference(eager, sample, traced.recorder, traced.out, traced.attributes)
    if why is not None:
        raise CaptureError(f"{refusal} (read from its code, {why})") from direct
    return traced


def _trace(sample: Sample, *, read: bool) -> _Traced:
    recorder = Recorder(new_fake_mode())
    fakes, leaves = placeholders(sample, recorder)
    fake_args, fake_kwargs = sample.structure.rebuild([fakes[id(t)] for t in sample.tensors])
    given = split((fake_args, fake_kwargs))[1].key
    try:
        with left_as_it_was(sample.model, {} if read else fakes) as before:
            out = _run(sample, recorder, fakes, None if read else (fake_args, fake_kwargs))
            attributes = settle(before, recorder)
    finally:
        fill_tables(recorder)
    if split((fake_args, fake_kwargs))[1].key != given:
        raise CaptureError(
            "forward changes one of its arguments (a list, dict or object such as a cache), which "
            "a plan cannot repeat; pass tensors, or switch the cache off (use_cache=False)"
        )
    return _Traced(recorder, tuple(leaves), out, attributes)


def _run(
    sample: Sample,
    recorder: Recorder,
    fakes: dict[int, torch.Tensor],
    given: tuple[Any, Any] | None,
) -> Any:
    """The model's own code on the given stand-ins, or that code as Dynamo reads it."""
    model = sample.model
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_saved_regions_plainly())
        stack.enter_context(libraries_see_real_tensors())
        stack.enter_context(fake_tensors_answer(recorder.numpy))
        stack.enter_context(recurrent_layers_call(cudnn_rnn.run))
        if autocast_state():
            stack.callback(torch.clear_autocast_cache)
        if given is None:
            return run_read(sample.call, model, sample.args, sample.kwargs, recorder, fakes)
        stack.enter_context(module_paths(model, recorder))
        stack.enter_context(recorder.fake_mode)
        stack.enter_context(recorder)
        return sample.call(model, *given[0], **given[1])


def _joint(sample: Sample, traced: _Traced) -> JointGraph:
    """The forward alone."""
    recorder = traced.recorder
    out_tensors, out_structure = split((traced.out, list(traced.attributes.values())))
    outputs = tuple(recorder.node_of(t) for t in out_tensors)
    if not any(node.op == "call_function" for node in recorder.graph.nodes):
        raise NothingToPlan(
            "the model runs no ops: there is nothing to plan; give a model that computes"
        )
    nodes = tuple(recorder.graph.nodes)
    return JointGraph(
        nodes=nodes,
        device=sample.device,
        parameters=tuple(sample.parameters),
        buffers=tuple(sample.buffers),
        inputs=tuple(sample.input_names),
        constants=tuple(recorder.constants),
        outputs=outputs,
        output_structure=out_structure,
        attributes=tuple(traced.attributes),
        differentiable=tuple(t.requires_grad for t in out_tensors),
        tangents=(),
        autocast=(),
        gradients=(),
        idle=(),
        scalars=tuple(recorder.scalars),
        session=Session(recorder, tuple(out_tensors), traced.leaves, nodes),
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
    hooks = [leaf.register_hook(_as_stored(leaf, owners)) for leaf in leaves]
    roots = [outputs[t.output] for t in tangents]
    try:
        one_thread = torch.autograd.set_multithreading_enabled(False)  # as eager on a CPU
        with autocast_as(joint.autocast), one_thread, recorder:
            found = torch.autograd.grad(roots, leaves, grads, allow_unused=True, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    gradients = tuple(
        (recorder.node_of(leaf), recorder.node_of(gradient))
        for leaf, gradient in zip(leaves, found, strict=True)
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


def _as_stored(leaf: torch.Tensor, owners: set[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A gradient as `.grad` will hold it. Eager copies one that has not the parameter's layout or
    that somebody else holds; the copy stands in the graph, where the plan can count it."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
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


def _default_tangents(out: Any, tensors: Sequence[torch.Tensor]) -> tuple[Tangent, ...]:
    able = [i for i, t in enumerate(tensors) if t.requires_grad and t.grad_fn is not None]
    if not able:
        raise NothingToPlan("no output of the model is computed from what requires grad")
    named = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    scalars = [i for i in able if tensors[i].dim() == 0]
    losses = [i for i in able if tensors[i] is named] or scalars[:1]
    return tuple(Tangent(i, dense_stride(tensors[i])) for i in losses or able)


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
