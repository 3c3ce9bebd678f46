"""Autograd around and inside of a call (findings E11, E17)."""

import contextlib
import warnings
from typing import Any

import torch
from support.living.cases import BATCH, WIDTH, Living, Note, case, data
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit is deprecated, and used

    @torch.jit.script
    def scripted(h: Tensor, scale: float) -> Tensor:
        return torch.sin(h) * scale


@case("e17", quick=True)
class SparseGradients(Living):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12, sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.second(torch.sin(self.table(words)).mean(1))

    def inputs(self, step: int) -> Any:
        return ((data(step, BATCH, 5).abs() * 5).long().clamp(max=19),), {}


@case("e17")
class SparseLater(SparseGradients):
    def __init__(self) -> None:
        super().__init__()
        self.table.sparse = False

    def change(self) -> None:
        self.table.sparse = True


class Checkpointed(Living):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.3))

    def middle(self, h: Tensor) -> Tensor:
        h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return nn.functional.dropout(torch.sin(h), 0.2)


@case(quick=True)
class CheckpointInside(Checkpointed):
    def change(self) -> None:
        self.block[2].p = 0.6


@case()
class ReentrantCheckpointInside(CheckpointInside):
    reentrant = True


@case()
class CheckpointTurnedOn(Checkpointed):
    checkpointing = False

    def middle(self, h: Tensor) -> Tensor:
        return super().middle(h) if self.checkpointing else self.block(h)

    def change(self) -> None:
        self.checkpointing = True


@case()
class CheckpointWithoutItsStream(Checkpointed):
    def middle(self, h: Tensor) -> Tensor:
        return checkpoint(self.block, h, use_reentrant=False, preserve_rng_state=False)

    def change(self) -> None:
        self.block[2].p = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.block[2].p = 0.0


@case("e17")
class TorchScriptFunction(Living):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def middle(self, h: Tensor) -> Tensor:
        return scripted(h, self.scale)

    def change(self) -> None:
        self.scale = 3.0


class Twice(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        first, second = self(*args, **kwargs), self(args[0] * 0.5)
        note("output", (first, second))
        (self.loss(first) + self.loss(second)).backward()


@case()
class TwoCallsBeforeTheBackward(Twice):
    def change(self) -> None:
        self.register_buffer("unused", torch.zeros(1))


@case()
class TwoCallsWithDropout(Twice):
    """The second forward draws before the first backward recomputes. Each backward alone, so that
    the order of sums is the same."""

    def middle(self, h: Tensor) -> Tensor:
        return nn.functional.dropout(torch.sin(h), 0.4)

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        first, second = self(*args, **kwargs), self(args[0] * 0.5)
        note("output", (first, second))
        self.loss(first).backward()
        self.loss(second).backward()


@case("e11", shows=False, quick=True)
class ForwardModeAround(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if self.asked:
            with forward_ad.dual_level():
                out = self(forward_ad.make_dual(args[0], torch.ones_like(args[0])))
                value, tangent = forward_ad.unpack_dual(out)
                note("tangent", tangent)
                note("value", value)
        super().train_step(note, args, kwargs)

    asked = False

    def change(self) -> None:
        self.asked = True


@case("e11", shows=False)
class JvpAround(ForwardModeAround):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if self.asked:
            note("jvp", torch.func.jvp(self, args, (torch.ones_like(args[0]),)))
        Living.train_step(self, note, args, kwargs)


@case("e17", shows=False, quick=True)
class GradOfFunctorchAround(Living):
    asked = False

    def change(self) -> None:
        self.asked = True

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if self.asked:
            note("grad", torch.func.grad(lambda x: self.loss(self(x)))(args[0]))
        super().train_step(note, args, kwargs)


@case("e17", shows=False)
class VmapAround(GradOfFunctorchAround):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if self.asked:
            note("vmap", torch.func.vmap(self)(args[0].view(8, 8, WIDTH)))
        Living.train_step(self, note, args, kwargs)


@case("e17", shows=False)
class FunctionalCallAround(GradOfFunctorchAround):
    """Other parameters than its own, by name."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if self.asked:
            other = {k: (v * 0.5).detach().requires_grad_() for k, v in self.named_parameters()}
            out = torch.func.functional_call(self, other, args)
            note("called with others", out)
            grads = torch.autograd.grad(self.loss(out), list(other.values()))
            note("gradients of others", grads)
        Living.train_step(self, note, args, kwargs)


@case("e17", shows=False)
class PerSampleGradients(GradOfFunctorchAround):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        if self.asked:
            state = {k: v.detach() for k, v in self.named_parameters()}

            def loss(state: Any, x: Tensor) -> Tensor:
                return self.loss(torch.func.functional_call(self, state, (x[None],)))

            each = torch.func.vmap(torch.func.grad(loss), (None, 0))(state, args[0])
            note("per sample", each)
        Living.train_step(self, note, args, kwargs)


@case("e17", quick=True)
class AnomalyMode(Living):
    def before(self, step: int) -> None:
        torch.autograd.set_detect_anomaly(step == 2)

    def leave(self) -> None:
        torch.autograd.set_detect_anomaly(False)

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Anomaly Detection")
            super().train_step(note, args, kwargs)


@case("e17")
class AnomalyModeFindsNan(AnomalyMode):
    """Eager raises: a function returned nan values."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.sqrt(h - h.detach())


@case(refusal="double backward")
class GradientPenalty(Living):
    """A gradient of a gradient."""

    def middle(self, h: Tensor) -> Tensor:
        return torch.sin(h)

    def inputs(self, step: int) -> Any:
        return (data(step, requires_grad=True),), {}

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        (grad,) = torch.autograd.grad(out.sum(), args[0], create_graph=True)
        (grad.square().mean() + self.loss(out)).backward()


@case()
class BackwardTwiceRetained(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        loss = self.loss(out)
        loss.backward(retain_graph=True)
        loss.backward()


@case()
class BackwardTwiceFreed(Living):
    """Eager raises at the second backward."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        loss = self.loss(out)
        loss.backward()
        loss.backward()


@case()
class OneGradientOfSeveral(Living):
    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        wanted = [self.first.weight, self.second.bias]
        note("gradients", torch.autograd.grad(self.loss(out), wanted, retain_graph=True))
        note("others", torch.autograd.grad(self.loss(out), [self.first.bias]))


class Doubled(torch.autograd.Function):
    scale = 2.0

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * Doubled.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * Doubled.scale * ctx.saved_tensors[0].sign()


@case("e4", breaks=True)
class FunctionReadsAClassAttribute(Living):
    def middle(self, h: Tensor) -> Tensor:
        return Doubled.apply(h)

    def change(self) -> None:
        Doubled.scale = 3.0

    def leave(self) -> None:
        Doubled.scale = 2.0


@case()
class GradModeInside(Living):
    def __init__(self) -> None:
        super().__init__()
        self.stop = False

    def middle(self, h: Tensor) -> Tensor:
        with torch.set_grad_enabled(not self.stop):
            gate = torch.sigmoid(h)
        return h * gate

    def change(self) -> None:
        self.stop = True


@case()
class DetachedByAFlag(Living):
    def __init__(self) -> None:
        super().__init__()
        self.stop = False

    def middle(self, h: Tensor) -> Tensor:
        return h * (h.detach() if self.stop else h)

    def change(self) -> None:
        self.stop = True


@case()
class AutocastInside(Living):
    def __init__(self) -> None:
        super().__init__()
        self.dtype: Any = torch.bfloat16
        self.layer = nn.Linear(12, 12)

    def middle(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            return self.layer(h).float()

    def change(self) -> None:
        self.dtype = None


@case()
class SavedTensorsHooksAround(Living):
    """A pack hook of the caller sees what eager saves; the numbers are the same."""

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        around: Any = contextlib.nullcontext()
        if self.asked:
            around = torch.autograd.graph.save_on_cpu()
        with around:
            super().train_step(note, args, kwargs)

    asked = False

    def change(self) -> None:
        self.asked = True
