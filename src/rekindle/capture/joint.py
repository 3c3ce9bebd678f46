"""model + sample -> `JointGraph`: every op of one forward and backward, as eager runs it.

The model's own `forward` runs once on tensors without data, under the autograd engine, and a
recorder below autograd writes down each op (see `record`). Nothing is decomposed, functionalized
or compiled, and the model is not told that it is being compiled: the kernels, their order and the
in-place ops are eager's own. The model is left as it was: parameters, buffers, plain attributes,
random streams.
"""

import contextlib
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from rekindle.capture.fuse import fuse as fuse_elementwise
from rekindle.capture.loss import join_loss_gradients
from rekindle.capture.record import Kind, Recorder, Scalar, Source
from rekindle.capture.structure import Structure, path_names, split
from rekindle.errors import CaptureError
from rekindle.torch_compat import (
    FakeTensor,
    FakeTensorMode,
    autocast_state,
    libraries_see_real_tensors,
    outside_modes,
    run_saved_regions_plainly,
    storage_key,
    without_autocast,
)


@dataclass(frozen=True, slots=True)
class Tangent:
    """The layout that the gradient of one output is assumed to arrive in."""

    output: int  # among the output tensors
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Session:
    """What a capture leaves open: the forward's autograd graph, over tensors without data, from
    which the backward of any choice of outputs can be recorded later."""

    recorder: Recorder
    outputs: tuple[torch.Tensor, ...]
    leaves: tuple[torch.Tensor, ...]
    forward_nodes: tuple[fx.Node, ...]
    fuse: bool


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
    output_structure: Structure
    differentiable: tuple[bool, ...]  # per output: whether eager would give it a grad_fn
    tangents: tuple[Tangent, ...]  # the outputs whose gradient is assumed to arrive
    gradients: tuple[tuple[fx.Node, fx.Node], ...]  # (placeholder, node of its gradient)
    idle: tuple[fx.Node, ...]  # placeholders that get a gradient from other outputs only
    scalars: tuple[Scalar, ...]
    session: Session

    @property
    def forward_only(self) -> bool:
        return not self.tangents

    def with_tangents(self, tangents: Sequence[Tangent]) -> "JointGraph":
        """The same forward with another backward: gradients arrive for other outputs, or in
        other layouts."""
        with outside_modes(), self.session.recorder.fake_mode:
            return _with_backward(self, tuple(tangents))


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    call: Callable[..., Any] | None = None,
    fuse: bool = True,
) -> JointGraph:
    """The joint graph of `model.forward(*args, **kwargs)`, or of `call(model, *args, **kwargs)`.

    Under `torch.no_grad()` the forward alone. Gradients are assumed to arrive for the loss where
    there is one (an output called so, or a scalar), else for every output that requires grad;
    `JointGraph.with_tangents` records the backward of another choice. `fuse`: chains of elementwise
    ops on a GPU become one kernel each, where that is exact.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(model).__name__}: {str(model)[:60]}")
    kwargs = dict(kwargs or {})
    tensors, structure = split((tuple(args), kwargs))
    parameters, buffers = _named(model)
    device = _one_device(parameters, buffers, tensors)
    recorder = Recorder(FakeTensorMode(allow_non_fake_inputs=True))
    input_names = path_names((tuple(args), kwargs), "args")
    fakes: dict[int, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []
    grad = torch.is_grad_enabled()
    named: tuple[tuple[Kind, Any], ...] = (
        ("parameter", parameters.items()),
        ("buffer", buffers.items()),
        ("input", zip(input_names, tensors, strict=True)),
    )
    for kind, items in named:
        for i, (name, real) in enumerate(items):
            if id(real) in fakes:
                continue
            fake = fakes[id(real)] = _fake(recorder.fake_mode, real)
            recorder.placeholder(fake, Source(kind, name, i), real)
            if grad and fake.requires_grad:
                leaves.append(fake)
    fake_args, fake_kwargs = structure.rebuild([fakes[id(t)] for t in tensors])
    given = split((fake_args, fake_kwargs))[1].key
    with _left_as_it_was(model, fakes), contextlib.ExitStack() as stack:
        stack.enter_context(run_saved_regions_plainly())
        stack.enter_context(libraries_see_real_tensors())
        stack.enter_context(_module_paths(model, recorder))
        stack.enter_context(recorder.fake_mode)
        stack.enter_context(recorder)
        try:
            if call is not None:
                out = call(model, *fake_args, **fake_kwargs)
            else:
                out = model.forward(*fake_args, **fake_kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise _explained(error) from error
        finally:
            if autocast_state():
                torch.clear_autocast_cache()
    if split((fake_args, fake_kwargs))[1].key != given:
        raise CaptureError(
            "forward changes one of its arguments (a list, dict or object such as a cache), which "
            "a plan cannot repeat; pass tensors, or switch the cache off (use_cache=False)"
        )
    out_tensors, out_structure = split(out)
    outputs = tuple(recorder.node_of(t) for t in out_tensors)
    if not any(node.op == "call_function" for node in recorder.graph.nodes):
        raise CaptureError(
            "the model runs no ops: there is nothing to plan; give a model that computes"
        )
    nodes = tuple(recorder.graph.nodes)
    joint = JointGraph(
        nodes=nodes,
        device=device,
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        inputs=tuple(input_names),
        constants=tuple(recorder.constants),
        outputs=outputs,
        output_structure=out_structure,
        differentiable=tuple(t.requires_grad for t in out_tensors),
        tangents=(),
        gradients=(),
        idle=(),
        scalars=tuple(recorder.scalars),
        session=Session(recorder, tuple(out_tensors), tuple(leaves), nodes, fuse),
    )
    if not grad:
        if fuse:
            with outside_modes():
                fuse_elementwise(nodes, outputs)
        return joint
    if not leaves or not any(joint.differentiable):
        raise CaptureError(
            "nothing requires grad: no parameter or input that an output depends on has "
            "requires_grad=True; for inference call this under torch.no_grad()"
        )
    return joint.with_tangents(_default_tangents(out, out_tensors))


def _explained(error: Exception) -> Exception:
    """A CaptureError where the trouble is that tensors have no data; else the error itself, which
    is the model's own and would come in eager too."""
    text = " ".join(str(error).split())
    no_data = ("data pointer", "FakeTensor", "fake tensor", ".numpy()", "numpy()")
    if not isinstance(error, NotImplementedError) and not any(w in text for w in no_data):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    inner = frames[-1]
    return CaptureError(
        f"the model cannot run on tensors without data: {type(error).__name__} in {inner.name} "
        f"({inner.filename}:{inner.lineno}): {text[:300]}; manage the submodules around it one by "
        "one"
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
        # In eager the backward runs outside autocast, and in this thread on a CPU.
        with without_autocast(), torch.autograd.set_multithreading_enabled(False), recorder:
            found = torch.autograd.grad(roots, leaves, grads, allow_unused=True, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    gradients = tuple(
        (recorder.node_of(leaf), recorder.node_of(gradient))
        for leaf, gradient in zip(leaves, found, strict=True)
        if gradient is not None
    )
    backward_nodes = tuple(recorder.graph.nodes)[num_before:]
    join_loss_gradients(backward_nodes)
    all_nodes = (*session.forward_nodes, *backward_nodes)
    if session.fuse:
        with outside_modes():
            fuse_elementwise(all_nodes, (*joint.outputs, *(g for _, g in gradients)))
    known = {leaf for leaf, _ in gradients}
    reached = reachable_leaves([t for t in outputs if t.requires_grad])
    idle = [recorder.node_of(leaf) for leaf in leaves if id(leaf) in reached]
    return replace(
        joint,
        nodes=all_nodes,
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
        raise CaptureError("no output of the model is computed from what requires grad")
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


def _named(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters and buffers by name; one that is tied stands once, under its first name."""
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    buffers: dict[str, torch.Tensor] = dict(model.named_buffers())
    for name, tensor in (*parameters.items(), *buffers.items()):
        plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
        if not plain or tensor.is_sparse or tensor.is_nested:
            raise CaptureError(
                f"{name} is a {type(tensor).__name__} ({tensor.layout}); only plain dense tensors "
                "can be planned for now"
            )
    return parameters, buffers


def _one_device(
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    tensors: Sequence[torch.Tensor],
) -> torch.device:
    found: dict[torch.device, str] = {}
    for name, tensor in (*parameters.items(), *buffers.items()):
        if tensor.dim() or tensor.device.type != "cpu":
            found.setdefault(tensor.device, name)
    for i, tensor in enumerate(tensors):
        if tensor.dim():
            found.setdefault(tensor.device, f"argument tensor {i}")
    if len(found) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in found.items())
        raise CaptureError(
            f"the model and its arguments are spread over several devices ({places}); put them "
            "on one device, or manage each part alone"
        )
    return next(iter(found), torch.device("cpu"))


def _fake(fake_mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor:
    if isinstance(real, FakeTensor):
        raise CaptureError("the model or its arguments are fake tensors; give real ones")
    if type(real) is torch.Tensor:
        fake = fake_mode.from_tensor(real.detach(), static_shapes=True)
        return fake.requires_grad_(real.requires_grad)
    return fake_mode.from_tensor(real, static_shapes=True)


_TABLES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module, fakes: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Fake tensors stand in for parameters and buffers inside; afterwards every module has its
    attributes back, those that `forward` set included."""
    saved = []
    for module in model.modules():
        # Tables of the module itself, hooks among them, are changed in place: their contents count.
        tables = [
            (table, dict(table))
            for name, table in module.__dict__.items()
            if isinstance(table, dict) and (name in _TABLES or "hooks" in name)
        ]
        saved.append((module, dict(module.__dict__), tables))
    python_state = random.getstate()

    def stand_in(value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            return fakes.get(id(value), value)
        if depth < 2 and type(value) in (list, tuple):
            return type(value)(stand_in(v, depth + 1) for v in value)
        if depth < 2 and type(value) is dict:
            return {k: stand_in(v, depth + 1) for k, v in value.items()}
        return value

    try:
        for module, attributes, _ in saved:
            for table in (module._parameters, module._buffers):
                table.update({k: stand_in(v) for k, v in table.items()})
            for name, value in attributes.items():
                if name not in _TABLES and type(value) in (torch.Tensor, list, tuple, dict):
                    module.__dict__[name] = stand_in(value)
        yield
    finally:
        for module, attributes, tables in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for table, contents in tables:
                table.clear()
                table.update(contents)
        drew = random.getstate() != python_state
        random.setstate(python_state)
    if drew:
        raise CaptureError(
            "forward draws from Python's `random`, which a plan would freeze; draw with torch"
        )


@contextlib.contextmanager
def _module_paths(model: nn.Module, recorder: Recorder) -> Iterator[None]:
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
