"""Recurrent layers, and Python that asks tensors for numbers."""

from typing import Any

import torch
from support.living.cases import BATCH, WIDTH, Living, case, data
from torch import Tensor, nn


class Recurrent(Living):
    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.rnn = self.kind(12, 12, num_layers=2, dropout=0.2, batch_first=True)

    def middle(self, h: Tensor) -> Tensor:
        out, _ = self.rnn(h.view(8, 8, 12))
        return out.reshape(BATCH, 12)


@case(quick=True)
class Lstm(Recurrent):
    def change(self) -> None:
        self.rnn.dropout = 0.6


@case()
class Gru(Recurrent):
    kind = nn.GRU

    def change(self) -> None:
        with torch.no_grad():
            self.rnn.weight_hh_l0.mul_(0.5)


@case(breaks=True)
class LstmKeepsItsState(Living):
    """Truncated backpropagation: the state goes from call to call, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(12, 12, batch_first=True)
        self.state: Any = None

    def middle(self, h: Tensor) -> Tensor:
        out, state = self.rnn(h.view(8, 8, 12), self.state)
        self.state = tuple(t.detach() for t in state)
        return out.reshape(BATCH, 12)

    def change(self) -> None:
        self.state = None

    def observed(self) -> Any:
        return self.state


@case(quick=True)
class BranchOnABuffer(Living):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.tensor(1.0))

    def middle(self, h: Tensor) -> Tensor:
        return h * 2 if self.level.item() > 0 else torch.relu(h)

    def change(self) -> None:
        self.level.neg_()


@case()
class NumberOfABuffer(BranchOnABuffer):
    def middle(self, h: Tensor) -> Tensor:
        return h * self.level.item()


@case(breaks=True, steady=False)
class BufferCountsAndIsRead(Living):
    """Warm-up by a buffer: read at each call, and written by it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * (0.5 if int(self.calls) < 3 else 2.0)


@case()
class BranchOnAnInput(Living):
    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h * 2 if flag.item() > 0 else torch.relu(h))

    def inputs(self, step: int) -> Any:
        return (data(step), torch.tensor(1.0 if step < 2 else -1.0)), {}


@case(breaks=True)
class BranchOnTheInputsSum(Living):
    def middle(self, h: Tensor) -> Tensor:
        if not torch.isfinite(h).all():
            raise ValueError("not finite")
        return h * 2 if (h > -2).all() else h

    def inputs(self, step: int) -> Any:
        return (data(step) if step != 2 else torch.full((BATCH, WIDTH), float("nan")),), {}


@case(breaks=True, steady=False)
class DataDependentShape(Living):
    def middle(self, h: Tensor) -> Tensor:
        kept = h[h[:, 0] > 0]
        return torch.sin(kept)
