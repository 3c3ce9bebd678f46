"""Joint forward and backward graphs of small models, traced on fake tensors."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from rekindle.capture.node_facts import NodeFacts, set_facts


def trace(fn: Callable[..., Any], *args: Any) -> fx.Graph:
    """With what is known of each node as a capture has it."""
    graph = make_fx(fn, tracing_mode="fake")(*args).graph
    for node in graph.nodes:
        if node.op == "call_function" or "val" in node.meta:
            set_facts(node, NodeFacts(node.meta.get("val")))
    return graph


def joint_graph(model: nn.Module, loss: Callable[[Any], Tensor], *args: Tensor) -> fx.Graph:
    """Forward, loss and all parameter gradients as one graph."""
    names = [n for n, _ in model.named_parameters()]
    buffer_names = [n for n, _ in model.named_buffers()]

    def step(
        parameters: tuple[Tensor, ...], buffers: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        state = dict(zip([*names, *buffer_names], [*parameters, *buffers], strict=True))
        out = loss(torch.func.functional_call(model, state, inputs))
        return torch.autograd.grad(out, parameters, allow_unused=True)

    parameters = tuple(p.detach().clone().requires_grad_() for p in model.parameters())
    return trace(step, parameters, tuple(b.clone() for b in model.buffers()), *args)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.num_heads, self.dropout, self.causal = num_heads, dropout, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=self.causal
        )
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), self.dropout)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout)


class Gpt(nn.Module):
    def __init__(self, num_layers: int = 2, width: int = 64, vocabulary: int = 131) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 4, 0.1, True) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 48, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, 48))
        self.blocks = nn.Sequential(*(Block(48, 3, 0.0, False) for _ in range(2)))
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.blocks(x)[:, 0])


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Residual(16),
        nn.Conv2d(16, 24, 1, 2),
        Residual(24),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.middle = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(24, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.silu(self.enter(x))
        low = F.silu(self.norm(self.down(high)))
        smooth = F.interpolate(self.middle(low)[:, :8], scale_factor=2, mode="bilinear")
        near = F.interpolate(F.max_pool2d(high, 2), scale_factor=2, mode="nearest")
        return self.leave(torch.cat([self.up(low) + smooth, high, near], 1))


class Fno(nn.Module):
    """Spectral convolution: complex parameters, slice assignment, conjugates in the backward."""

    def __init__(self, width: int = 6, modes: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.drop = nn.Conv2d(2, width, 1), nn.Conv2d(width, 1, 1)
        scale = 1 / math.sqrt(width)
        self.weight = nn.Parameter(scale * torch.randn(width, width, modes, modes).cfloat())

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        m = self.modes
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.weight)
        return self.drop(F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + x))


def mean_square(out: Tensor) -> Tensor:
    return out.square().mean()


@functools.cache
def model_graphs() -> dict[str, fx.Graph]:
    torch.manual_seed(0)
    ids = torch.randint(0, 131, (2, 16))
    image = torch.randn(2, 3, 32, 32)
    return {
        "gpt": joint_graph(Gpt(), lambda out: out, ids),
        "vit": joint_graph(Vit(), mean_square, image),
        "resnet": joint_graph(resnet(), mean_square, image),
        "unet": joint_graph(Unet(), mean_square, image),
        "fno": joint_graph(Fno(), mean_square, torch.randn(2, 2, 16, 16)),
        "vit bf16": joint_graph(Vit().bfloat16(), mean_square, image.bfloat16()),
    }
