"""Models of the zoo that no library at hand brings: written out, small, torch alone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DoubleConvolution(nn.Sequential):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Two levels down and up with skips by concatenation, dropout at the bottom."""

    def __init__(self, channels_in: int, channels_out: int, width: int) -> None:
        super().__init__()
        self.down1 = DoubleConvolution(channels_in, width)
        self.down2 = DoubleConvolution(width, 2 * width)
        self.bottom = DoubleConvolution(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.join2 = DoubleConvolution(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join1 = DoubleConvolution(2 * width, width)
        self.last = nn.Conv2d(width, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        bottom = F.dropout(self.bottom(F.max_pool2d(second, 2)), 0.1, self.training)
        y = self.join2(torch.cat([second, self.up2(bottom)], dim=1))
        return self.last(self.join1(torch.cat([first, self.up1(y)], dim=1)))


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.across_patches = self._mlp(patches)
        self.across_channels = self._mlp(width)

    @staticmethod
    def _mlp(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.across_channels(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(self, size: int, patch: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(
            *(MixerBlock((size // patch) ** 2, width) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class FourierNet(nn.Module):
    """Spectral layers in one dimension: complex parameters, assignment into a slice."""

    def __init__(self, width: int, modes: int, depth: int = 2) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.ParameterList(
            torch.randn(width, width, modes, dtype=torch.cfloat) / width for _ in range(depth)
        )
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for weight, skip in zip(self.weights, self.skips, strict=True):
            spectrum = torch.fft.rfft(x)
            out = torch.zeros_like(spectrum)
            out[:, :, : self.modes] = torch.einsum(
                "bim,iom->bom", spectrum[:, :, : self.modes], weight
            )
            x = F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + skip(x))
        return x.transpose(1, 2)


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(self.dropout(x)))


class LoRAStack(nn.Sequential):
    def __init__(self, width: int, rank: int, depth: int) -> None:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [
                nn.LayerNorm(width).requires_grad_(False),
                LoRALinear(width, rank),
                nn.GELU(),
            ]
        super().__init__(*layers)


class Experts(nn.Module):
    """The two best experts of each token, all shapes static: a capacity per expert, one-hot
    dispatch and combine."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.wide = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.narrow = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        capacity = flat.shape[0] // 2
        weight, choice = torch.topk(self.router(flat).softmax(dim=-1), 2, dim=-1)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        chosen = F.one_hot(choice, self.experts)  # token, rank, expert
        order = chosen.transpose(0, 1).reshape(-1, self.experts)
        place = (order.cumsum(dim=0) - 1) * order
        place = place.reshape(2, -1, self.experts).transpose(0, 1)
        fits = (place < capacity) & chosen.bool()
        slot = F.one_hot(place.clamp(max=capacity - 1), capacity).to(x.dtype)
        dispatch = slot * fits.unsqueeze(-1)  # token, rank, expert, place
        inside = torch.einsum("tkec,td->ecd", dispatch, flat)
        outside = torch.bmm(F.silu(torch.bmm(inside, self.wide)), self.narrow)
        back = torch.einsum("tkec,tk,ecd->td", dispatch, weight, outside)
        return back.reshape(x.shape)


class ExpertStack(nn.Module):
    def __init__(self, width: int, experts: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(width, experts) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(layer(norm(x)))
        return x
