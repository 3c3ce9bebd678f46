"""Arguments and outputs: aliasing, writes in place, other shapes (findings E8, E11, E17)."""

from typing import Any

import torch
from support.living.cases import BATCH, WIDTH, Living, Note, case, data
from torch import Tensor, nn


class TakesTwo(Living):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * torch.sigmoid(self.first(y)))


class OfTwo(TakesTwo):
    apart = (True, True, False, True)  # of each step

    def inputs(self, step: int) -> Any:
        x = data(step, requires_grad=True)
        return (x, data(step + 50, requires_grad=True) if self.apart[step] else x), {}


@case("e9", quick=True)
class InputsBecomeOne(OfTwo):
    """The same tensor twice: its gradient is one sum."""


@case("e9")
class InputsComeApart(OfTwo):
    apart = (False, False, True, False)


@case("e9")
class InputWrittenWhereBothAreOne(Living):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return self.second(torch.tanh(self.first(x)) * torch.sigmoid(self.first(y)))

    def inputs(self, step: int) -> Any:
        x = data(step)
        return (x, data(step + 50) if step < 2 else x), {}


@case("e9")
class InputIsAView(InputWrittenWhereBothAreOne):
    def inputs(self, step: int) -> Any:
        x = data(step, 2 * BATCH, WIDTH)
        return (x[:BATCH], x[BATCH:] if step < 2 else x[10 : BATCH + 10]), {}


@case("e9")
class InputIsAParameter(Living):
    """A weight given from outside that becomes one of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(data(9, 12, WIDTH))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * torch.sigmoid(x @ weight.t())
        return self.second(torch.sin(h))

    def inputs(self, step: int) -> Any:
        other = data(9, 12, WIDTH, requires_grad=True)
        return (data(step), other if step < 2 else self.first.weight), {}


@case("e9")
class InputIsABuffer(Living):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, 12))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) + shift
        self.shift.mul_(0.5)
        return self.second(torch.sin(h + shift))

    def inputs(self, step: int) -> Any:
        return (data(step), torch.linspace(0, 1, 12) if step < 2 else self.shift), {}


@case("e11", quick=True)
class ArgumentMadeToRequireGrad(Living):
    """As in a gradient penalty: the caller finds a gradient at its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        return super().forward(x)


@case("e17", shows=False, quick=True)
class OutputIsAViewOfAnArgument(Living):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = super().forward(x)
        return x[:4].t(), x, out

    def loss(self, out: Any) -> Tensor:
        return out[2].square().mean() + out[0].sum() * 0.5

    def inputs(self, step: int) -> Any:
        return (data(step, requires_grad=True),), {}

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("same storage", out[0].data_ptr() == args[0].data_ptr())
        note("same object", out[1] is args[0])
        note("output", out)
        self.loss(out).backward()


@case("e17", shows=False)
class OutputIsAViewOfAParameter(Living):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.first.weight.t()

    def loss(self, out: Any) -> Tensor:
        return out[0].square().mean() + out[1].square().mean()


@case("e17")
class OutputsShareStorage(Living):
    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, out.t(), out[:, 0]

    def loss(self, out: Any) -> Tensor:
        return out[0].square().mean() + out[1][0].sum() + out[2].sum()


class Written(Living):
    """Something is written in place between forward and backward."""

    requires_grad = False

    def write(self, out: Tensor, x: Tensor) -> Tensor:
        """Gives what the loss is made of."""
        return out

    def inputs(self, step: int) -> Any:
        return (data(step, requires_grad=self.requires_grad),), {}

    def train_step(self, note: Note, args: Any, kwargs: Any) -> None:
        out = self(*args, **kwargs)
        note("output", out)
        out = self.write(out, args[0])
        note("written", out)
        self.loss(out).backward()


@case("e8", quick=True)
class OutputZeroed(Written):
    """Eager allows it: nothing has saved the output of a linear layer."""

    def write(self, out: Tensor, x: Tensor) -> Tensor:
        return out.mul_(0).add_(x[:, :3])


class EndsInTanh(Written):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


@case("e8", quick=True)
class SavedOutputScaled(EndsInTanh):
    """Eager refuses: tanh's backward reads its output."""

    def write(self, out: Tensor, x: Tensor) -> Tensor:
        return out.mul_(2)


@case("e8")
class SavedOutputScaledWithoutGradient(EndsInTanh):
    def write(self, out: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            out.clamp_(-0.1, 0.1)
        return out


@case("e8")
class SavedOutputDataWritten(EndsInTanh):
    """`.data` has a version of its own: eager computes with what is there."""

    def write(self, out: Tensor, x: Tensor) -> Tensor:
        out.data.mul_(0.5)
        return out


@case("e8")
class DetachedOutputZeroed(EndsInTanh):
    def write(self, out: Tensor, x: Tensor) -> Tensor:
        out.detach().zero_()
        return out


@case("e8")
class ViewOfOutputWritten(Written):
    def write(self, out: Tensor, x: Tensor) -> Tensor:
        out[:, 0] = 1.0
        return out


@case("e8")
class SecondOutputWritten(Written):
    """The hidden state is an output and saved for the backward of the layer after it."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))
        return self.second(torch.sin(h)), h

    def write(self, out: Any, x: Tensor) -> Any:
        out[1].mul_(0.5)
        return out

    def loss(self, out: Any) -> Tensor:
        return out[0].square().mean()


@case("e8")
class HiddenOutputDetachedAndWritten(SecondOutputWritten):
    def write(self, out: Any, x: Tensor) -> Any:
        out[1].detach().mul_(0.5)
        return out


@case("e8")
class InputRefilledWhereItIsSaved(Written):
    """Eager refuses: the first layer's weight needs the input."""

    def write(self, out: Tensor, x: Tensor) -> Tensor:
        x.copy_(data(77))
        return out


@case("e8", refusal="changed in place between the forward and the backward", quick=True)
class InputRefilled(Written):
    """Eager allows it: what is saved is made of the input, and recomputing reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)
        self.mix = nn.Linear(12, 12)

    def middle(self, h: Tensor) -> Tensor:
        return torch.sin(self.mix(h))

    def write(self, out: Tensor, x: Tensor) -> Tensor:
        x.copy_(data(77))
        return out


@case("e8", refusal="buffer shift")
class BufferWrittenBeforeTheBackward(InputRefilled):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, 12))

    def middle(self, h: Tensor) -> Tensor:
        return torch.sin(self.mix(h) + self.shift)

    def write(self, out: Tensor, x: Tensor) -> Tensor:
        self.shift.mul_(0.5)
        return out


@case("e8")
class WeightWrittenBeforeTheBackward(Written):
    def write(self, out: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.second.weight.mul_(0.5)
        return out


@case("e8")
class WeightDataWrittenBeforeTheBackward(Written):
    def write(self, out: Tensor, x: Tensor) -> Tensor:
        self.second.weight.data.mul_(0.5)
        return out


@case("e8", refusal="parameter first.bias")
class BiasWrittenBeforeTheBackward(Written):
    """No backward reads a bias, and recomputing does."""

    def write(self, out: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.bias.mul_(0.5)
        return out


@case("e17", breaks=True)
class SampleIsNoLeaf(Living):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)

    def inputs(self, step: int) -> Any:
        return (data(step, requires_grad=True) * 1,), {}


@case()
class OtherShape(Living):
    def inputs(self, step: int) -> Any:
        return (data(step, 64 if step < 2 else 48, WIDTH),), {}


@case()
class LastBatchIsSmaller(Living):
    def inputs(self, step: int) -> Any:
        return (data(step, (64, 64, 1, 64)[step], WIDTH),), {}


@case()
class OtherDtype(Living):
    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())

    def inputs(self, step: int) -> Any:
        return (data(step).to(torch.float32 if step < 2 else torch.float64),), {}


@case()
class OtherStrides(Living):
    def inputs(self, step: int) -> Any:
        return (data(step) if step < 2 else data(step, WIDTH, BATCH).t(),), {}


@case()
class ExpandedInput(Living):
    def inputs(self, step: int) -> Any:
        return (data(step) if step < 2 else data(step, 1, WIDTH).expand(BATCH, WIDTH),), {}


@case()
class InputRequiresGrad(Living):
    def inputs(self, step: int) -> Any:
        return (data(step, requires_grad=step >= 2),), {}


@case()
class MaskGivenLater(Living):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h if mask is None else h.masked_fill(mask, 0.0))

    def inputs(self, step: int) -> Any:
        return (data(step),), {} if step < 2 else {"mask": data(step, BATCH, 12) > 0}


@case()
class ListOfInputs(Living):
    def forward(self, xs: list[Tensor]) -> Tensor:
        h = torch.stack([torch.tanh(self.first(x)) for x in xs]).sum(0)
        return self.second(h)

    def inputs(self, step: int) -> Any:
        return ([data(step + 10 * i) for i in range(2 if step < 2 else 3)],), {}


@case()
class WrittenByForward(Living):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        out = super().forward(x)
        total.add_(out.detach().sum(0))
        return out + total

    def inputs(self, step: int) -> Any:
        self.total = torch.zeros(3) + step
        return (data(step), self.total), {}

    def observed(self) -> Any:
        return getattr(self, "total", None)


@case()
class TensorSubclassLater(Living):
    """A parameter given as an input is still a tensor."""

    def inputs(self, step: int) -> Any:
        x = data(step)
        return (x if step < 2 else nn.Parameter(x),), {}


@case()
class NumbersInATensor(Living):
    """A number that is data, not Python: one plan for all."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * scale)

    def inputs(self, step: int) -> Any:
        return (data(step), torch.tensor(1.0 + step)), {}
