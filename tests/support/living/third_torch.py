"""Settings of torch that choose kernels, and autograd's Python (third wave)."""

import warnings
from typing import Any

import torch
from support.living.cases import HIDDEN, OUT, WIDTH, Living, Note, case, data
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Attends(Living):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def middle(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h).view(4, 16, 3, 2, 6).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(64, HIDDEN)


@case("e4")
class FlashAttentionSwitchedOff(Attends):
    """The switch for flash attention is read by torch's C++, out of sight of Python's guards."""

    def change(self) -> None:
        torch.backends.cuda.enable_flash_sdp(False)

    def leave(self) -> None:
        torch.backends.cuda.enable_flash_sdp(True)


@case("e4")
class AttentionKernelChosenInForward(Attends):
    def __init__(self) -> None:
        super().__init__()
        self.backends = [torch.nn.attention.SDPBackend.MATH]

    def middle(self, h: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(self.backends):
            return super().middle(h)

    def change(self) -> None:
        self.backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION]


class OneDnn(Living):
    """oneDNN switched off between steps."""

    def change(self) -> None:
        torch._C._set_mkldnn_enabled(False)

    def leave(self) -> None:
        torch._C._set_mkldnn_enabled(True)


@case("e4")
class OneDnnSwitchedOffForConvolutions(OneDnn):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.conv(h.unsqueeze(1)).mean(1)


@case("e4")
class OneDnnSwitchedOffForRecurrentLayers(OneDnn):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, HIDDEN, batch_first=True)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.rnn(h.view(64, 4, 3))[0].mean(1)


@case("e4")
class MatmulPrecision(Living):
    def change(self) -> None:
        torch.set_float32_matmul_precision("medium")

    def leave(self) -> None:
        torch.set_float32_matmul_precision("highest")


@case("e4")
class FastPathOfAttention(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(HIDDEN, 2, 16, dropout=0.1, batch_first=True)

    def middle(self, h: Tensor) -> Tensor:
        return self.layer(h.view(4, 16, HIDDEN)).reshape(64, HIDDEN)

    def change(self) -> None:
        torch.backends.mha.set_fastpath_enabled(False)

    def leave(self) -> None:
        torch.backends.mha.set_fastpath_enabled(True)


@case("e4")
class NumberOfThreads(Living):
    def change(self) -> None:
        self.threads = torch.get_num_threads()
        torch.set_num_threads(2)

    def leave(self) -> None:
        torch.set_num_threads(getattr(self, "threads", torch.get_num_threads()))


@case("e4", shows=False)
class InferenceModeBetween(Living):
    def change(self) -> None:
        with torch.inference_mode():
            self.seen = float(self(data(31)).sum())

    def observed(self) -> Any:
        return getattr(self, "seen", None)


GAIN = {"gain": 2.0}


class ReadsInTheBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * GAIN["gain"]


class WithFunction(Living):
    def middle(self, h: Tensor) -> Tensor:
        return ReadsInTheBackward.apply(h)

    def leave(self) -> None:
        GAIN["gain"] = 2.0


@case("e4")
class FunctionReadsAGlobal(WithFunction):
    def change(self) -> None:
        GAIN["gain"] = 0.5


@case("e4", refusal="this no longer holds")
class GlobalOfAFunctionBeforeTheBackward(WithFunction):
    """What the backward reads changes after the forward: eager reads it then."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        GAIN["gain"] = 2.0
        out = self(*args, **kwargs)
        note("output", out)
        GAIN["gain"] = 0.5
        self.loss(out).backward()


@case("e4", refusal="this no longer holds")
class TensorHookReadsBeforeTheBackward(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0

    def middle(self, h: Tensor) -> Tensor:
        h = torch.sin(h)
        h.register_hook(lambda gradient: gradient * self.gain)
        return h * 2

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        self.gain = 2.0
        out = self(*args, **kwargs)
        note("output", out)
        self.gain = 0.5
        self.loss(out).backward()


@case("e4")
class TensorHookReadsANumber(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0

    def middle(self, h: Tensor) -> Tensor:
        h = torch.sin(h)
        h.register_hook(lambda gradient: gradient * self.gain)
        return h * 2

    def change(self) -> None:
        self.gain = 0.5


class AsksWhatIsNeeded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        ctx.half = 0.5
        return h * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        h, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        return gradient * weight, (gradient * h * ctx.half).sum(0) if wanted else None


@case("e9")
class FunctionAsksWhatIsNeeded(Living):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def middle(self, h: Tensor) -> Tensor:
        return AsksWhatIsNeeded.apply(torch.sin(h), self.weight)

    def change(self) -> None:
        self.weight.requires_grad_(False)


@case("")
class CheckpointedSequence(Living):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.2), nn.Tanh()) for _ in range(4)]
        self.layers, self.parts = nn.Sequential(*layers), 2

    def middle(self, h: Tensor) -> Tensor:
        return checkpoint_sequential(self.layers, self.parts, h, use_reentrant=False)

    def change(self) -> None:
        self.parts = 4


@case("")
class CheckpointToggledWithDropout(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.3)), True

    def middle(self, h: Tensor) -> Tensor:
        if self.on:
            return checkpoint(self.layer, torch.sin(h), use_reentrant=False)
        return self.layer(torch.sin(h))

    def before(self, step: int) -> None:
        self.on = step % 2 == 0


@case("", breaks=True)
class SavedOnTheHostInForward(Living):
    def middle(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.sin(torch.sin(h))


@case("e17")
class FunctionalCallInside(Living):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.delta = nn.Parameter(torch.zeros(12, 12))
        self.gain = 1.0

    def middle(self, h: Tensor) -> Tensor:
        weights = {"weight": self.layer.weight + self.gain * self.delta, "bias": self.layer.bias}
        return torch.func.functional_call(self.layer, weights, (h,))

    def change(self) -> None:
        self.gain = 2.0


@case("", breaks=True)
class LazyLayer(Living):
    """Gets its weight at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(12)
        self(data(50))

    def middle(self, h: Tensor) -> Tensor:
        return self.lazy(h)


@case("")
class ChannelsLast(Living):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def middle(self, h: Tensor) -> Tensor:
        return h + self.norm(self.conv(h.view(64, 3, 2, 2))).mean((1, 2, 3)).unsqueeze(1)

    def change(self) -> None:
        self.to(memory_format=torch.channels_last)


@case("e11")
class PartialBackward(Living):
    """Gradients for one parameter alone, then for all."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        loss = self.loss(out)
        loss.backward(inputs=[self.second.weight], retain_graph=True)
        note("partial", self.second.weight.grad)
        loss.backward()


@case("e17")
class OutputHooked(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        out.register_hook(lambda gradient: gradient * 2)
        out.retain_grad()
        self.loss(out).backward()
        note("gradient of the output", out.grad)


@case("e11", refusal="or its gradient was asked for")
class GradientOfAStoredAndUsedActivation(Living):
    """The loss uses it as well: what comes from outside alone would be a wrong gradient."""

    def middle(self, h: Tensor) -> Tensor:
        self.h = torch.sin(h)
        return self.h * 2

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        loss = self.loss(out) + self.h.square().mean()
        note("gradients", torch.autograd.grad(loss, [self.h, self.first.weight]))
        self.h = None


@case("e11", refusal="or its gradient was asked for")
class GradientOfAStoredActivationAlone(GradientOfAStoredAndUsedActivation):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        loss = self.loss(out) + self.h.square().mean()
        (gradient,) = torch.autograd.grad(loss, [self.h])
        note("gradients", gradient)
        self.h = None


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit is deprecated, and used

    @torch.jit.script
    def gelu_by_hand(h: Tensor, gain: float) -> Tensor:
        return h * 0.5 * (1.0 + torch.tanh(0.79788456 * (h + 0.044715 * h * h * h))) * gain


@case("e17")
class TorchScriptFunctionWithANumber(Living):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.5

    def middle(self, h: Tensor) -> Tensor:
        return gelu_by_hand(h, self.gain)

    def change(self) -> None:
        self.gain = 0.5
