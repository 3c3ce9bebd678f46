"""`verify`: runs one step of the original and one of the managed model and compares them bitwise.

Compared are outputs, gradients of parameters and inputs, buffers, and the states of the random
number generators. With compiled kernels the bits are not eager's: then each result's distance from
a step in float64 is compared with that of eager's result, as torch tests torch.compile. Both models
are left as they were: gradients, buffers and states are restored.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rekindle.capture.pytrees import path_names, split
from rekindle.capture.random_streams import left_alone, reachable_generators
from rekindle.capture.tensor_args import map_tensors
from rekindle.errors import RekindleError
from rekindle.frontend import call_of
from rekindle.plans.options import as_args
from rekindle.predict import Prediction, StepMeasurement, measure_step
from rekindle.runtime.managed_module import loss_of


@dataclass(frozen=True, slots=True)
class Item:
    """One compared tensor and what differs; "" if both are bitwise identical."""

    name: str
    difference: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `verify`: true if everything is bitwise identical. `str()` gives the text."""

    items: tuple[Item, ...]  # all that was compared
    bitwise: bool = True  # False: within a tolerance, as compiled kernels are
    predicted: Prediction | None = None  # peak and time of a step, with `costs=True`
    measured: StepMeasurement | None = None

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def differences(self) -> tuple[str, ...]:
        return tuple(f"{i.name}: {i.difference}" for i in self.items if i.difference)

    def __bool__(self) -> bool:
        return self.equal

    @property
    def comparison(self) -> str:
        """What was compared and what differs, as text."""
        if self.equal and not self.bitwise:
            return (
                f"as near to float64 as eager PyTorch: all {len(self.items)} outputs, gradients "
                "and buffers (compiled kernels, not bitwise identical)"
            )
        if self.equal:
            return (
                f"bitwise identical: all {len(self.items)} outputs, gradients, buffers and random "
                "number generator states"
            )
        shown = "\n  ".join(self.differences[:20])
        return f"{len(self.differences)} of {len(self.items)} differ:\n  {shown}"

    def __str__(self) -> str:
        if self.predicted is None or self.measured is None:
            return self.comparison
        return f"{self.comparison}\n{self.predicted.against(self.measured)}"


def verify(
    model: nn.Module,
    managed: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    costs: bool = False,
) -> Verdict:
    """Runs one step of both models from the same state and compares outputs, gradients, buffers and
    random number generators bitwise. Compiled kernels (`kernels="inductor"`) are compared within a
    tolerance instead: at most three times eager's distance from a step in float64, plus 1e-5 of the
    result's size (1e-2 for dtypes of 16 bits). Where the managed model was given a `loss_fn`, the
    original's output goes through it. `costs=True` also predicts and measures the peak and time of
    a managed step."""
    args, kwargs = as_args(args), dict(kwargs or {})
    loss_fn = loss_of(managed)
    own_loss = None if loss_of(model) is loss_fn else loss_fn
    first = _step(model, args, kwargs, own_loss)
    second = _step(managed, args, kwargs)
    if _is_compiled(managed):
        return Verdict(
            tuple(_near(model, args, kwargs, own_loss, first, second)),
            bitwise=False,
            predicted=managed.plan.predict() if costs else None,
            measured=measure_step(managed, args, kwargs) if costs else None,
        )
    # Of both: a gradient that only one of them has is a difference too.
    names = list(dict.fromkeys((*first, *second)))
    missing = object()
    return Verdict(
        tuple(
            Item(name, _difference(first.get(name, missing), second.get(name, missing), missing))
            for name in names
        ),
        predicted=managed.plan.predict() if costs else None,
        measured=measure_step(managed, args, kwargs) if costs else None,
    )


# ---- compiled kernels


def _is_compiled(managed: nn.Module) -> bool:
    plan = getattr(managed, "plan", None)
    return plan is not None and plan.record.options.kernels != "eager"


def _near(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
    first: dict[str, Any],
    second: dict[str, Any],
) -> Iterator[Item]:
    states = _generator_states(model, args, kwargs)
    random = [f"random number generator {name}" for name in states]
    for name, state in zip(random, states.values(), strict=True):
        if any(name in step and not torch.equal(step[name], state) for step in (first, second)):
            raise RekindleError(
                "the model draws random numbers, and with compiled kernels they are "
                "torch.compile's: there is nothing to compare them with; verify it without dropout "
                "(p=0, or model.eval() before planning)"
            )
    exact = _in_float64(model, args, kwargs, loss_fn)
    for name in dict.fromkeys((*first, *second)):
        if name not in random:
            yield Item(name, _distance(first.get(name), second.get(name), exact.get(name)))


def _in_float64(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None,
) -> dict[str, Any]:
    """What a step leaves in float64; nothing where the model cannot run so."""

    def doubled(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().double().requires_grad_(leaf.requires_grad)

    try:
        twin = copy.deepcopy(model).double()
        given, named = map_tensors(doubled, (tuple(args), kwargs))
        return _step(twin, given, named, loss_fn)
    except Exception:  # a kernel without float64, a module that cannot be copied
        return {}


def _distance(first: Any, second: Any, exact: Any) -> str:
    missing = object()
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return _difference(first, second, missing)
    if first.shape != second.shape or first.dtype != second.dtype or not first.is_floating_point():
        return _difference(first, second, missing)
    comparable = isinstance(exact, torch.Tensor) and exact.shape == first.shape
    reference = exact.double() if comparable else first.double()
    own = _rms(second.double() - reference)
    eager = _rms(first.double() - reference)
    share = 1e-5 if first.dtype.itemsize > 2 else 1e-2
    if own <= 3 * eager + share * _rms(reference):
        return ""
    return f"{own:.3e} from float64, where eager is {eager:.3e} (root mean squares)"


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


def _step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_fn: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """What a step leaves. `loss_fn` is what the managed model does besides the model's forward."""
    found: dict[str, Any] = {}
    with _restored_after(model, args, kwargs):
        inputs, _ = split((tuple(args), kwargs))
        leaves = [*model.parameters(), *(t for t in inputs if t.requires_grad and t.is_leaf)]
        for leaf in leaves:
            leaf.grad = None  # a gradient that is there would be added to: other last bits
        if loss_fn is None:
            out = model(*args, **kwargs)
        else:
            out = call_of(model, tuple(args), kwargs, loss_fn).eager()
        tensors, _ = split(out)
        names = path_names(out, "output")
        found |= {name: t.detach().clone() for name, t in zip(names, tensors, strict=True)}
        roots = _roots(out, tensors)
        # As the plan takes the caller to do: what is compared has been copied.
        if getattr(getattr(model, "plan", None), "hold_outputs", True) is False:
            del out, tensors
        _backward(roots)
        for name, parameter in model.named_parameters():
            found[f"gradient of {name}"] = _copied(parameter.grad)
        for name, tensor in zip(path_names((tuple(args), kwargs), "args"), inputs, strict=True):
            if tensor.requires_grad and tensor.is_leaf:
                found[f"gradient of {name}"] = _copied(tensor.grad)
        for name, buffer in model.named_buffers():
            found[f"buffer {name}"] = buffer.detach().clone()
        for name, state in _generator_states(model, args, kwargs).items():
            found[f"random number generator {name}"] = state
    return found


def _roots(out: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the backward starts from: the loss, where the outputs tell which it is, or all."""
    able = [t for t in tensors if t.requires_grad]
    named = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    losses = [t for t in able if t is named] or [t for t in able if t.dim() == 0][:1]
    return losses or able


def _backward(roots: Sequence[torch.Tensor]) -> None:
    if not roots:
        return
    # Both models get the same gradients, from a generator of their own: the global generator is
    # compared. Ones would hide a wrong scale.
    generator = torch.Generator().manual_seed(0)
    grads = []
    for root in roots:
        fresh = torch.rand(root.shape, generator=generator, dtype=torch.float64) + 0.5
        gradient = torch.empty_like(root)
        grads.append(gradient.copy_(fresh.to(root.dtype)))
    torch.autograd.backward(roots, grads)


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _generator_states(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, torch.Tensor]:
    found = {"cpu": torch.get_rng_state()}
    for i, generator in enumerate(reachable_generators(model, args, kwargs)):
        found[f"of the model {i}"] = generator.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for i in range(torch.cuda.device_count()):
            found[f"cuda:{i}"] = torch.cuda.get_rng_state(i)
    return found


@contextlib.contextmanager
def _restored_after(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[None]:
    inputs, _ = split((tuple(args), kwargs))
    tensors = [*model.parameters(), *inputs]
    grads = [t.grad if t.is_leaf else None for t in tensors]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    contents = [(t, t.detach().clone()) for t in inputs]
    own = reachable_generators(model, args, kwargs)
    cpu = torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    versions = [t._version for t, _ in contents]
    try:
        with left_alone(own):
            yield
    finally:
        with torch.no_grad():
            for buffer, old in buffers:
                # A write raises the version, with which autograd would refuse a later backward.
                if not torch.equal(_bits(buffer), _bits(old)):
                    buffer.copy_(old)
            for (tensor, old), version in zip(contents, versions, strict=True):
                if tensor._version != version:
                    tensor.copy_(old)
        for tensor, gradient in zip(tensors, grads, strict=True):
            if tensor.is_leaf:
                tensor.grad = gradient
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(gpus)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Compared as bytes: NaN is not equal to NaN, and -0.0 is equal to 0.0.
    plain = tensor.detach().contiguous()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    return plain.resolve_neg().reshape(-1).view(torch.uint8)


def _difference(first: Any, second: Any, missing: object) -> str:
    if first is missing or second is missing:
        return "only one of the two models has it"
    if first is None or second is None:
        return "" if first is second else "it is None in one of the two models"
    # First what must agree for the elements to be compared at all.
    for what in ("shape", "dtype", "device"):
        a, b = getattr(first, what), getattr(second, what)
        if a != b:
            return f"{what} {b}, expected {a}"
    if torch.equal(_bits(first), _bits(second)):
        return ""
    if not (first.is_floating_point() or first.is_complex()):
        return f"{int((first != second).sum())} elements differ"
    # In float64: the difference of two numbers of a narrow dtype may not be one of it.
    gap = (first.double() if not first.is_complex() else first) - second
    scale = first.abs().max().item() or 1.0  # all zeros: the difference itself is shown
    return (
        f"{int((gap != 0).sum())} of {gap.numel()} elements differ, by at most "
        f"{gap.abs().max().item():.3e} ({gap.abs().max().item() / scale:.1e} of the largest)"
    )
