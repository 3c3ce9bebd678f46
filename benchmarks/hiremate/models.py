"""The twelve models of HiRemate's Table 4, written out or taken from the usual libraries, at the
sizes of the upstream repository's defaults; and the small ones of its Table 3.

`FACTORIES[name]() -> (model, args)`. Modules are made on the device that is current.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Sample = tuple[nn.Module, tuple[Any, ...]]


class GPT(nn.Module):
    """GPT-2 blocks with explicit attention, learned positions, a language-model head."""

    def __init__(self, num_layers: int, width: int = 768, heads: int = 12, vocab: int = 50257):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.wte(ids) + self.wpe(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop_a, self.drop_o, self.drop_m = nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weights = self.drop_a(scores.masked_fill(~mask, float("-inf")).softmax(-1))
        mixed = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop_o(self.out(mixed))
        return x + self.drop_m(self.down(F.gelu(self.up(self.norm2(x)))))


class UNet(nn.Module):
    def __init__(self, num_in: int = 3, num_out: int = 1, features: int = 32):
        super().__init__()
        widths = [features << k for k in range(5)]
        self.down = nn.ModuleList(
            _double(a, b) for a, b in zip([num_in, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[3::-1])
        self.rise = nn.ModuleList(_double(2 * w, w) for w in widths[3::-1])
        self.head = nn.Conv2d(features, num_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for k, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if k else x)
            skips.append(x)
        skips.pop()
        for up, rise in zip(self.up, self.rise, strict=True):
            x = rise(torch.cat((up(x), skips.pop()), 1))
        return torch.sigmoid(self.head(x))


def _double(num_in: int, num_out: int) -> nn.Sequential:
    def one(a: int) -> list[nn.Module]:
        return [nn.Conv2d(a, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()]

    return nn.Sequential(*one(num_in), *one(num_out))


class Mixer(nn.Module):
    def __init__(self, image: int = 256, patch: int = 16, width: int = 512, depth: int = 12):
        super().__init__()
        tokens = (image // patch) ** 2
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.ModuleList(MixerBlock(tokens, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(
            nn.Conv1d(tokens, 4 * tokens, 1), nn.GELU(), nn.Conv1d(4 * tokens, tokens, 1)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x))
        return x + self.channels(self.norm2(x))


class Transformer(nn.Module):
    """nn.Transformer with explicit attention, encoder and decoder, post-norm."""

    def __init__(self, layers: int, width: int = 512, heads: int = 16):
        super().__init__()
        self.model = nn.Transformer(width, heads, layers, layers, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(source, target)


class Spectral(nn.Module):
    """Multiplication by learned weights on the lowest Fourier modes."""

    def __init__(self, num_in: int, num_out: int, modes: tuple[int, ...]):
        super().__init__()
        self.modes = modes
        corners = 2 ** (len(modes) - 1)
        self.num_out = num_out
        self.weights = nn.ParameterList(
            torch.randn(num_in, num_out, *modes, dtype=torch.cfloat) / num_in
            for _ in range(corners)
        )

    def forward(self, x: Tensor, sizes: tuple[int, ...] | None = None) -> Tensor:
        num = len(self.modes)
        dims = tuple(range(-num, 0))
        freq = torch.fft.rfftn(x, dim=dims)
        shape = sizes or x.shape[2:]
        out = torch.zeros(
            x.shape[0],
            self.num_out,
            *shape[:-1],
            shape[-1] // 2 + 1,
            dtype=freq.dtype,
            device=x.device,
        )
        letters = "xyz"[:num]
        for corner, weight in enumerate(self.weights):
            low = [
                slice(-m, None) if corner >> k & 1 else slice(m)
                for k, m in enumerate(self.modes[:-1])
            ]
            at = (slice(None), slice(None), *low, slice(self.modes[-1]))
            rule = f"bi{letters},io{letters}->bo{letters}"
            out[at] = torch.einsum(rule, freq[at], weight)
        return torch.fft.irfftn(out, s=tuple(shape), dim=dims)


class FNO(nn.Module):
    def __init__(self, num_in: int, modes: tuple[int, ...], width: int, layers: int, u: int = 0):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(modes) - 1]
        self.lift = conv(num_in, width, 1)
        self.spectral = nn.ModuleList(Spectral(width, width, modes) for _ in range(layers))
        self.linear = nn.ModuleList(conv(width, width, 1) for _ in range(layers))
        self.inner = nn.ModuleList(UBlock(width) for _ in range(u))
        self.out1, self.out2 = conv(width, 128, 1), conv(128, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        first = len(self.spectral) - len(self.inner)
        for k, (spectral, linear) in enumerate(zip(self.spectral, self.linear, strict=True)):
            y = spectral(x) + linear(x)
            if k >= first:
                y = y + self.inner[k - first](x)
            x = F.gelu(y)
        return self.out2(F.gelu(self.out1(x)))


class UBlock(nn.Module):
    """The small U-net inside the later layers of U-FNO."""

    def __init__(self, width: int):
        super().__init__()

        def down(stride: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv3d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm3d(width),
                nn.LeakyReLU(0.1),
                nn.Dropout(0.0),
            )

        self.d1, self.d2, self.d2b, self.d3, self.d3b = down(2), down(2), down(1), down(2), down(1)
        self.u2 = nn.ConvTranspose3d(width, width, 4, 2, 1)
        self.u1 = nn.ConvTranspose3d(2 * width, width, 4, 2, 1)
        self.u0 = nn.ConvTranspose3d(2 * width, width, 4, 2, 1)
        self.out = nn.Conv3d(2 * width, width, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x)
        b = self.d2b(self.d2(a))
        c = self.d3b(self.d3(b))
        y = F.leaky_relu(self.u2(c), 0.1)[:, :, : b.shape[2], : b.shape[3], : b.shape[4]]
        y = F.leaky_relu(self.u1(torch.cat((b, y), 1)), 0.1)
        y = y[:, :, : a.shape[2], : a.shape[3], : a.shape[4]]
        y = F.leaky_relu(self.u0(torch.cat((a, y), 1)), 0.1)
        y = y[:, :, : x.shape[2], : x.shape[3], : x.shape[4]]
        return self.out(torch.cat((x, y), 1))


class UNO(nn.Module):
    """U-shaped neural operator on 3D data: spectral layers that shrink and grow the grid."""

    def __init__(self, num_in: int = 6, width: int = 8):
        super().__init__()
        factors = (2, 4, 8, 8, 4, 2)
        widths = [width, *(width * f for f in factors)]
        self.lift = nn.Conv3d(num_in, width, 1)
        self.scale = (0.5, 0.5, 1.0, 1.0, 2.0, 2.0)
        skips = (0, 0, 0, 0, widths[2], widths[1])
        self.spectral, self.linear, self.norm = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for k, skip in enumerate(skips):
            self.spectral.append(Spectral(widths[k] + skip, widths[k + 1], (4, 4, 2)))
            self.linear.append(nn.Conv3d(widths[k] + skip, widths[k + 1], 1))
            self.norm.append(nn.InstanceNorm3d(widths[k + 1]))
        self.out1, self.out2 = (
            nn.Conv3d(widths[-1] + width, 4 * width, 1),
            nn.Conv3d(4 * width, 1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = first = F.gelu(self.lift(x))
        kept = []
        for k, scale in enumerate(self.scale):
            if k >= 4:
                x = torch.cat((x, kept.pop()), 1)
            sizes = tuple(int(s * scale) for s in x.shape[2:])
            if k >= 4:
                sizes = tuple((kept[-1] if kept else first).shape[2:])
            y = self.spectral[k](x, sizes)
            z = F.interpolate(self.linear[k](x), size=sizes, mode="trilinear")
            x = F.gelu(self.norm[k](y) + z)
            if k < 2:
                kept.append(x)
        return self.out2(F.gelu(self.out1(torch.cat((x, first), 1))))


class Residual(nn.Module):
    """A residual block: two 3x3 convolutions, or 1x1, 3x3 (in groups), 1x1."""

    def __init__(self, num_in: int, middle: int, num_out: int, stride: int, groups: int | None):
        super().__init__()
        plan = [(num_in, middle, 3, stride, 1), (middle, num_out, 3, 1, 1)]
        if groups is not None:
            plan = [
                (num_in, middle, 1, 1, 1),
                (middle, middle, 3, stride, groups),
                (middle, num_out, 1, 1, 1),
            ]
        layers: list[nn.Module] = []
        for a, b, size, step, parts in plan:
            layers.append(nn.Conv2d(a, b, size, step, size // 2, groups=parts, bias=False))
            layers.append(nn.BatchNorm2d(b))
            layers.append(nn.ReLU(inplace=True))
        self.body = nn.Sequential(*layers[:-1])
        self.short: nn.Module = nn.Identity()
        if stride > 1 or num_in != num_out:
            conv = nn.Conv2d(num_in, num_out, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(num_out))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.short(x))


class ConvNet(nn.Module):
    """ResNet and RegNet: a stem, stages of residual blocks, a linear head."""

    def __init__(
        self,
        stem: int,
        pool: bool,
        stages: list[tuple[int, int, int]],
        groups: int | None,
        group_width: int | None = None,
    ):
        super().__init__()
        size, step = (7, 2) if pool else (3, 2)
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem, size, step, size // 2, bias=False),
            nn.BatchNorm2d(stem),
            nn.ReLU(inplace=True),
        )
        self.pool: nn.Module = nn.MaxPool2d(3, 2, 1) if pool else nn.Identity()
        blocks: list[nn.Module] = []
        width = stem
        for k, (depth, middle, out) in enumerate(stages):
            parts = middle // group_width if group_width else groups
            for j in range(depth):
                stride = 2 if j == 0 and (k or not pool) else 1
                blocks.append(Residual(width, middle, out, stride, parts))
                width = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(x)))
        return self.head(x.mean((2, 3)))


def resnet101(batch: int = 64, size: int = 256) -> Sample:
    stages = [(3, 64, 256), (4, 128, 512), (23, 256, 1024), (3, 512, 2048)]
    return ConvNet(64, True, stages, 1), (torch.randn(batch, 3, size, size),)


def resnet34(batch: int = 64, size: int = 256) -> Sample:
    stages = [(3, 64, 64), (4, 128, 128), (6, 256, 256), (3, 512, 512)]
    return ConvNet(64, True, stages, None), (torch.randn(batch, 3, size, size),)


def regnet_x_32gf(batch: int = 23, size: int = 256) -> Sample:
    stages = [(2, 336, 336), (7, 672, 672), (13, 1344, 1344), (1, 2520, 2520)]
    return ConvNet(32, False, stages, 1, 168), (torch.randn(batch, 3, size, size),)


def gpt(layers: int, batch: int = 100, length: int = 20) -> Sample:
    return GPT(layers), (torch.zeros(batch, length, dtype=torch.long),)


def transformer(layers: int, batch: int = 32, length: int = 200) -> Sample:
    return Transformer(layers), (torch.randn(batch, length, 512), torch.randn(batch, length, 512))


def unet(batch: int = 50, size: int = 256) -> Sample:
    return UNet(), (torch.randn(batch, 3, size, size),)


FACTORIES: dict[str, Callable[[], Sample]] = {
    "GPT-24": lambda: gpt(24),
    "GPT-96": lambda: gpt(96),
    "UNet": unet,
    "Mixer": lambda: (Mixer(), (torch.randn(100, 3, 256, 256),)),
    "RegNet": regnet_x_32gf,
    "ResNet-101": resnet101,
    "Transformer 6-6": lambda: transformer(6),
    "Transformer 36-36": lambda: transformer(36),
    "FNO 1d": lambda: (FNO(1, (16,), 64, 4), (torch.randn(4400, 1, 256),)),
    "FNO 3d": lambda: (FNO(10, (16, 16, 16), 64, 4), (torch.randn(5, 10, 64, 64, 40),)),
    "U-FNO": lambda: (FNO(12, (10, 10, 10), 36, 6, u=3), (torch.randn(3, 12, 96, 200, 24),)),
    "UNO": lambda: (UNO(), (torch.randn(2, 6, 64, 64, 10),)),
}
# The paper states no batch sizes; these bring the plain peak just above its largest budgets.
SMALL: dict[str, Callable[[], Sample]] = {
    "ResNet-34": lambda: resnet34(128),
    "UNet": unet,
    "Transformer 2-2": lambda: transformer(2, batch=100),
    "Mixer": FACTORIES["Mixer"],
    "GPT-5": lambda: gpt(5),
}
FURTHER: dict[str, Callable[[], Sample]] = {"GPT-12": lambda: gpt(12)}  # of Rockmate's Fig. 12
