"""A model with the arguments it is captured for, and what stands in for their tensors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rekindle.capture.fake_tensors import stand_in
from rekindle.capture.node_facts import Kind, Source
from rekindle.capture.pytrees import path_names, split
from rekindle.capture.recorder import Recorder
from rekindle.errors import CaptureError
from rekindle.torch_compat import FakeTensor, FakeTensorMode


class Sample:
    """A model with the arguments it is captured for."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: Callable[..., Any],
    ) -> None:
        self.model, self.args, self.kwargs, self.call = model, args, kwargs, call
        self.tensors, self.structure = split((args, kwargs))
        self.input_names = path_names((args, kwargs), "args")
        self.parameters, self.buffers = _named(model)
        self.device = _one_device(self.parameters, self.buffers, self.tensors)


def placeholders(
    sample: Sample, recorder: Recorder
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """The stand-ins of parameters, buffers and arguments, by id, and those that need gradients."""
    fakes: dict[int, torch.Tensor] = {}
    leaves: list[torch.Tensor] = []
    named: tuple[tuple[Kind, Any], ...] = (
        ("parameter", sample.parameters.items()),
        ("buffer", sample.buffers.items()),
        ("input", zip(sample.input_names, sample.tensors, strict=True)),
    )
    for kind, items in named:
        for i, (name, real) in enumerate(items):
            if id(real) in fakes:
                continue
            fake = fakes[id(real)] = _fake(recorder.fake_mode, real)
            recorder.placeholder(fake, Source(kind, name, i), real)
            if torch.is_grad_enabled() and fake.requires_grad:
                leaves.append(fake)
    return fakes, leaves


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
        fake = stand_in(fake_mode, real.detach())
        return fake.requires_grad_(real.requires_grad)
    return stand_in(fake_mode, real)
