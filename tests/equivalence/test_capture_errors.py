"""Models that cannot be captured: one error, that names the op, the source line and a way out."""

import inspect
import warnings

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.errors import CaptureError, RekindleError


def refused(model: nn.Module, *args, **kwargs) -> str:
    with pytest.raises(CaptureError) as refusal:
        rekindle.rematerialize(model, args, kwargs, budget=0.5, time_limit_s=2)
    text = str(refusal.value)
    assert len(text) < 3000, "an error is read by a person"
    return text


class Selects(nn.Module):
    """The number of rows that are left depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        rows = torch.nonzero(h[:, 0] > 0)  # the line to be named
        return h[rows.squeeze(1)].sum()


def test_shapes_that_depend_on_the_data() -> None:
    text = refused(Selects(), torch.randn(16, 8))
    assert "nonzero" in text
    assert "test_capture_errors.py" in text
    lines, first = inspect.getsourcelines(Selects)
    number = first + next(i for i, line in enumerate(lines) if "line to be named" in line)
    assert str(number) in text, f"line {number} is not named"
    assert "submodule" in text or "torch.where" in text, "nothing to try is named"


def test_boolean_masks_are_named_too() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h[h > 0].sum()

    text = refused(Masks(), torch.randn(16, 8))
    assert "nonzero" in text or "index" in text
    assert "test_capture_errors.py" in text


def test_unique() -> None:
    class Unique(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return h.sum() * torch.unique(x.round()).numel()

    text = refused(Unique(), torch.randn(16, 8))
    assert "unique" in text


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_graph_of_no_ops() -> None:
    text = refused(Nothing(), torch.randn(4, 8, requires_grad=True))
    assert "no op" in text or "nothing to" in text or "does not compute" in text
    refused(nn.Identity(), torch.randn(4, 8, requires_grad=True))


def test_nothing_requires_grad() -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    text = refused(model, torch.randn(4, 8))
    assert "requires grad" in text or "requires_grad" in text
    assert "no_grad" in text or "requires_grad_(" in text or "inference" in text


def test_no_output_requires_grad() -> None:
    class Detaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).detach()

    text = refused(Detaches(), torch.randn(4, 8))
    assert "requires grad" in text or "requires_grad" in text or "detach" in text


def test_a_module_spread_over_several_devices() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = nn.Linear(8, 8)
            self.there = nn.Linear(8, 8, device="meta")

        def forward(self, x: Tensor) -> Tensor:
            return self.there(self.here(x).to("meta"))

    text = refused(Spread(), torch.randn(4, 8))
    assert "cpu" in text
    assert "meta" in text
    assert "device" in text


def test_an_input_on_another_device_than_the_model() -> None:
    text = refused(nn.Linear(8, 8, device="meta"), torch.randn(4, 8))
    assert "device" in text


def test_an_error_of_the_model_itself_is_shown() -> None:
    """A model that does not run at all is the user's bug: its own message must come through."""
    model = nn.Linear(8, 8)
    with pytest.raises((RekindleError, RuntimeError), match=r"cannot be multiplied|reduction dim"):
        rekindle.rematerialize(model, (torch.randn(4, 5),), budget=0.5)


def test_not_a_module() -> None:
    with pytest.raises((RekindleError, TypeError), match=r"nn\.Module"):
        rekindle.rematerialize(lambda x: x, (torch.randn(4, 8),), budget=0.5)


def test_a_refused_model_is_as_it_was() -> None:
    model = Selects()
    x = torch.randn(16, 8)
    state = torch.get_rng_state()
    refused(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model) is Selects
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).backward()
    assert type(model.linear.weight.grad) is Tensor
