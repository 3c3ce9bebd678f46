"""Models that Dynamo cannot read in one piece, for each of the reasons that are common."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16


class Block(nn.Module):
    """A residual block with dropout; `norm` is what it begins with."""

    def __init__(self, norm: str = "layer") -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if norm == "layer" else nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.flatten(0, 1)).view_as(x)
        return x + F.dropout(self.down(F.gelu(self.up(h))), 0.1, self.training)


class BlockWithTwoOutputs(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.mean(-1) * 2


class CrossBlock(nn.Module):
    """Reads what an encoder made twice: for keys and for values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.inner = Block()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(memory).transpose(1, 2), -1)
        return self.inner(x + weights @ self.v(memory))


class Stack(nn.Module):
    """Blocks and a head; subclasses say what runs between the blocks."""

    block: Any = Block

    def __init__(self, num_blocks: int = 4, **kwargs: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(**kwargs) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.means: list[float] = []
        self.num_calls = 0

    def loss(self, x: Tensor) -> Tensor:
        return self.head(x).pow(2).mean()


class Printing(Stack):
    """Side effects: each happens once per step, and none while planning."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        for block in self.blocks:
            x = block(x)
            self.means.append(float(x.detach().mean()))
        print("", end="")
        return self.loss(x)


class LayerDrop(Stack):
    """Random numbers of torch, of Python and of NumPy decide which blocks run."""

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            by_numpy = float(np.random.rand())  # noqa: NPY002
            drawn = (float(torch.rand(())), random.random(), by_numpy)
            if drawn[i % 3] < 0.3:
                continue
            x = block(x)
        return self.loss(x)


class ByNumpy(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x / float(np.abs(x.detach().numpy()).max())
        return self.loss(x)


class ByData(Stack):
    """A shape that depends on data, in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        some = x[x.sum(-1) > 0]
        for block in self.blocks[2:]:
            x = block(x)
        return self.loss(x) + some.pow(2).mean()


class EncoderDecoder(nn.Module):
    """What the encoder made is used twice in each block, and by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory, h = self.encoder(x), x
        for block in self.blocks:
            if torch.rand(()) < 0.2:
                continue
            h = block(h, memory)
        return h.pow(2).mean() + memory.mean()


class UnusedOutputs(Stack):
    """Blocks give two outputs, and a gradient arrives for one of them."""

    block = BlockWithTwoOutputs

    def forward(self, x: Tensor) -> dict[str, Any]:
        kept = []
        for block in self.blocks:
            if torch.rand(()) < 0.1:
                continue
            x, _ = block(x)
            kept.append(x)
        return {"loss": self.loss(x), "kept": kept}


class Looping(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(torch.randint(1, 4, ()))):
            for block in self.blocks:
                x = block(x)
        return self.loss(x)


class Checkpointed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            if torch.rand(()) < 0.1:
                continue
            x = checkpoint(block, x, use_reentrant=False)
        return self.loss(x)


class Double(torch.autograd.Function):
    """Custom code with Python in it that no graph can hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        print("", end="")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class Custom(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Double.apply(block(x))
        return self.loss(x)


class TwoWays(Stack):
    """One half of the blocks or the other."""

    def forward(self, x: Tensor) -> Tensor:
        first = bool(torch.rand(()) < 0.5)
        for block in self.blocks[:2] if first else self.blocks[2:]:
            x = block(x)
        return self.loss(x)


def sample(requires_grad: bool = False) -> tuple[Tensor]:
    return (torch.randn(8, 12, WIDTH, requires_grad=requires_grad),)
