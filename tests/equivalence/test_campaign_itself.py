"""The comparison is trusted only as far as it can fail: a second eager copy passes, and a copy
that is off by the least bit, one random draw or one buffer does not."""

import pytest
import torch
from support.compare import assert_same, bits, differences, train
from support.zoo import BY_NAME, CASES, Case
from torch import nn


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager_repeats_itself(case: Case, device: torch.device) -> None:
    expected = train(case.build(device))
    again = train(case.build(device))
    if device.type == "cpu":
        assert not differences(expected, again)
    assert any("gradient" in name and value is not None for name, value in expected.items())


class Perturbed(nn.Module):
    """The model with a hook-like change to its input, output, buffers or random stream."""

    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__()
        self.model = model
        self.how = how

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args, **kwargs):
        return self.model.named_buffers(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "draw":
            torch.rand(1)
        if self.how == "input":
            x = x * (1 + 1e-6)
        out = self.model(x)
        if self.how == "sign of zero":
            return torch.where(out == 0, -out, out)
        if self.how == "buffer":
            with torch.no_grad():
                list(self.model.buffers())[-1].add_(1)
        if self.how == "gradient":
            return out + (out - out.detach()) * 1e-6
        return out


@pytest.mark.parametrize("how", ["draw", "input", "buffer", "gradient"])
def test_a_perturbed_copy_is_found(how: str) -> None:
    case = BY_NAME["unet"]
    expected = train(case.build())
    example = case.build()
    got = train(example, Perturbed(example.model, how))
    with pytest.raises(AssertionError, match="differ from eager"):
        assert_same(expected, got)


def test_bits_tell_the_sign_of_zero() -> None:
    assert not torch.equal(bits(torch.tensor(0.0)), bits(torch.tensor(-0.0)))
    nan = torch.tensor(float("nan"))
    assert torch.equal(bits(nan), bits(nan.clone()))


def test_what_eager_does_not_repeat_is_held_to_be_close() -> None:
    """Noise in one gradient excuses the gradients of that step and all numbers after it, no
    earlier number, no random stream, and nothing that is far off."""
    case = BY_NAME["unet"]
    expected = train(case.build())
    gradients = [n for n in expected if n.startswith("step 1 gradient") and "input" not in n]
    noisy, other = gradients[0], gradients[-1]

    def off(name: str, by: float) -> dict:
        return {**expected, name: expected[name] * (1 + by)}

    again = off(noisy, 1e-6)
    for name in (noisy, other, "step 1 parameter " + other.split()[-1], "step 2 output 0"):
        assert_same(expected, off(name, 1e-6), again)
        with pytest.raises(AssertionError):
            assert_same(expected, off(name, 1e-6))
        with pytest.raises(AssertionError):
            assert_same(expected, off(name, 1e-1), again)
    for name in ("step 1 output 0", "step 0 gradient " + other.split()[-1]):
        with pytest.raises(AssertionError, match="differ from eager"):
            assert_same(expected, off(name, 1e-6), again)
    stream = next(n for n in expected if n.startswith("step 2") and "random stream" in n)
    with pytest.raises(AssertionError, match="differ from eager"):
        assert_same(expected, {**expected, stream: "another"}, again)
