"""The small models whose captured steps are golden, each with its arguments."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Sample = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class ConvNet(nn.Module):
    """Batch norm, ReLU in place, a residual sum in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))
        self.left = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))
        self.right = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.right(self.left(x))
        y += x
        return self.head(F.relu_(y).mean((2, 3)))


class Language(nn.Module):
    """An embedding that is also the last layer, and the loss inside."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                          nn.Linear(2 * width, width), nn.Dropout(0.1))
            for _ in range(3)
        )  # fmt: skip
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class UNet(nn.Module):
    """Skips, an upsampling, concatenations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, 2, 1)
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up, self.last = nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.silu(self.first(x))
        b = self.bottom(F.silu(self.down(a)))
        b = F.interpolate(self.up(b), scale_factor=2.0, mode="nearest")
        return self.last(torch.cat((a, b), 1))


class Recurrent(nn.Module):
    """Two layers of LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Counting(nn.Module):
    """Buffers that forward changes in place and anew, and a view that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.steps += 1
        h = torch.tanh(self.first(x))
        self.running.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        y = self.second(h - self.running) * 2
        y[:, :4].mul_(0.5)
        return y, h.exp()


def mlp() -> Sample:
    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(32, 16),), {}


def convolutions() -> Sample:
    return ConvNet(), (torch.randn(4, 3, 16, 16),), {}


def encoder() -> Sample:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return model, (torch.randn(4, 12, 32),), {}


def language() -> Sample:
    tokens = torch.randint(0, 64, (4, 16))
    return Language(), (tokens, tokens), {}


def unet() -> Sample:
    return UNet(), (torch.randn(2, 3, 16, 16),), {}


def recurrent() -> Sample:
    return Recurrent(), (torch.randn(4, 6, 8),), {}


def counting() -> Sample:
    return Counting(), (torch.randn(8, 16),), {}


def gpt2() -> Sample:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    tokens = torch.randint(0, 128, (2, 16))
    return GPT2LMHeadModel(config).train(), (), {"input_ids": tokens, "labels": tokens}


def t5() -> Sample:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=128, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(1, 128, (2, 12))
    return T5ForConditionalGeneration(config).train(), (), {"input_ids": tokens, "labels": tokens}


MODELS: dict[str, Callable[[], Sample]] = {
    factory.__name__: factory
    for factory in (
        mlp, convolutions, encoder, language, unet, recurrent, counting, gpt2, t5,
    )
}  # fmt: skip
