"""Training steps as records, and records compared bit by bit.

A record names everything a step leaves behind that a user could see: outputs (and their type),
gradients of parameters and inputs, buffers, parameters after the optimizer, the random streams.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from support.zoo import Example
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Record = dict[str, Tensor | str | None]


def keep(value: Tensor | None) -> Tensor | None:
    """A copy with the same layout, apart from autograd."""
    return None if value is None else value.detach().clone()


def random_streams(device: torch.device) -> dict[str, Tensor]:
    streams = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    return streams


def seed(number: int) -> None:
    torch.manual_seed(number)  # the CUDA generators too


def tensors_of(tree: Any) -> dict[str, Tensor]:
    leaves = pytree.tree_leaves(tree)
    return {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def record_state(record: Record, prefix: str, model: nn.Module, device: torch.device) -> None:
    for name, buffer in model.named_buffers():
        record[f"{prefix} buffer {name}"] = keep(buffer)
    for name, stream in random_streams(device).items():
        record[f"{prefix} random stream {name}"] = stream


def record_output(record: Record, prefix: str, output: Any) -> None:
    _, spec = pytree.tree_flatten(output)
    record[f"{prefix} structure"] = f"{type(output).__name__} {spec}"
    for path, tensor in tensors_of(output).items():
        record[f"{prefix} output {path}"] = keep(tensor)
        record[f"{prefix} output {path} requires grad"] = str(tensor.requires_grad)


def record_gradients(record: Record, prefix: str, model: nn.Module, inputs: Any) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        record[f"{prefix} gradient {name}"] = keep(parameter.grad)
    for path, tensor in tensors_of(inputs).items():
        if tensor.is_leaf:
            record[f"{prefix} gradient of input {path}"] = keep(tensor.grad)


def train(
    example: Example,
    call: nn.Module | None = None,
    *,
    steps: int = 3,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Record:
    """Runs `steps` steps through `call` (the example's own model where there is none), forward and
    loss inside of `around()`."""
    model = example.model
    call = model if call is None else call
    optimizer = example.make_optimizer()
    device = next(model.parameters()).device
    record: Record = {}
    seed(7)
    for step in range(steps):
        args, kwargs = example.inputs(step)
        with around():
            output = call(*args, **kwargs)
            record_output(record, f"step {step}", output)
            record_state(record, f"step {step} after forward", call, device)
            loss = example.loss(output)
        record[f"step {step} loss"] = keep(loss)
        loss.backward()
        record_gradients(record, f"step {step}", call, (args, kwargs))
        optimizer.step()
        optimizer.zero_grad()
        record_state(record, f"step {step} after backward", call, device)
        for name, parameter in call.named_parameters():
            record[f"step {step} parameter {name}"] = keep(parameter)
    return record


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in logical order: -0.0 is not 0.0, and any NaN is any other (which of
    two NaNs a sum gives back is up to the instruction)."""
    plain = tensor.detach().cpu().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain).contiguous()
    if plain.is_floating_point():
        plain = torch.where(plain.isnan(), torch.full_like(plain, float("nan")), plain)
    return plain.reshape(-1).view(torch.uint8)


def layout(tensor: Tensor) -> str:
    """Shape, strides where they mean something, dtype, device."""
    strides = [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    return f"{tuple(tensor.shape)} strides {strides} {tensor.dtype} on {tensor.device.type}"


def difference(expected: Tensor | str | None, got: Tensor | str | None) -> str | None:
    """None where both are the same to the bit, else what differs."""
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        if layout(expected) != layout(got):
            return f"{layout(got)}, expected {layout(expected)}"
        if torch.equal(bits(expected), bits(got)):
            return None
        if expected.is_floating_point() or expected.is_complex():
            gap = (expected.cpu() - got.cpu()).abs()
            return f"largest difference {gap.max().item():.3e}, {int((gap != 0).sum())} elements"
        return "other contents"
    if isinstance(expected, Tensor) or isinstance(got, Tensor) or expected != got:
        return f"{_short(got)}, expected {_short(expected)}"
    return None


def _short(value: Tensor | str | None) -> str:
    return layout(value) if isinstance(value, Tensor) else repr(value)


def differences(expected: Record, got: Record, ignore: Iterable[str] = ()) -> list[str]:
    skipped = set(ignore)
    found = [f"{name}: missing" for name in expected if name not in got]
    found += [f"{name}: not in eager" for name in got if name not in expected]
    for name, value in expected.items():
        if name in got and name not in skipped:
            what = difference(value, got[name])
            if what is not None:
                found.append(f"{name}: {what}")
    return found


def assert_same(expected: Record, got: Record, again: Record | None = None) -> None:
    """Equal to the bit. `again` is a second eager run: what eager does not repeat (some kernels on
    a GPU add in any order) is held to be close only."""
    noisy = _noisy(expected, again or expected)
    for name in noisy:
        close, other, twin = expected[name], got.get(name), (again or expected)[name]
        if isinstance(close, Tensor) and isinstance(other, Tensor) and isinstance(twin, Tensor):
            own = (close - twin).abs().max().item() if close.numel() else 0.0
            size = close.abs().max().item() if close.numel() else 0.0
            torch.testing.assert_close(other, close, rtol=1e-2, atol=max(10 * own, 1e-3 * size))
    found = differences(expected, got, noisy)
    if found:
        shown = "\n  ".join(found[:12])
        raise AssertionError(f"{len(found)} of {len(expected)} differ from eager:\n  {shown}")
    assert len(noisy) < len(expected), "eager repeats nothing: the comparison would be empty"


def _noisy(expected: Record, again: Record) -> list[str]:
    """What eager does not repeat, and the numbers that it repeats by luck: noise in one gradient of
    a step may reach any other, the parameters after it, and every later step."""
    differs = {d.split(":")[0] for d in differences(expected, again)}
    steps = [int(name.split()[1]) for name in differs if name.startswith("step ")]
    if not steps:
        return sorted(differs)
    first = min(steps)
    backward = (f"step {first} gradient", f"step {first} parameter")
    in_backward = all(n.startswith(backward) for n in differs if n.startswith(f"step {first} "))
    return [
        name
        for name, value in expected.items()
        if name in differs
        or (
            (isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()))
            and name.startswith("step ")
            and (int(name.split()[1]) >= first + in_backward or name.startswith(backward))
        )
    ]
