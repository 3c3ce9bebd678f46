"""Trains a small denoising UNet inside a budget. Skip connections keep early activations alive
until the end of the forward, which is why UNets run out of memory at high resolutions.

    python examples/train_unet.py --budget 0.5 --size 128

Uses the GPU where there is one.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import rekindle


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class UNet(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**k for k in range(depth)]
        self.down = nn.ModuleList(Block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(Block(3 * a, a) for a in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, noisy: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The mean squared error of the predicted noise: with the loss inside, all that a step
        needs is inside the budget."""
        x, skips = noisy, []
        for block in self.down[:-1]:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat((x, skips.pop()), dim=1))
        return F.mse_loss(self.head(x), noise)


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet(options.width, options.depth).to(device).train()
    images = torch.rand(options.batch, 3, options.size, options.size, device=device)

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn_like(images)
        return images + noise, noise

    managed = rekindle.rematerialize(
        model, args=sample(), budget=options.budget, time_limit_s=options.time_limit
    )

    optimizer = torch.optim.AdamW(managed.parameters(), lr=1e-3)
    for step in range(options.steps):
        loss = managed(*sample())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")

    eager = rekindle.measure(model, sample(), num_steps=1).peak_bytes
    peak = rekindle.measure(managed, sample(), num_steps=1).peak_bytes
    print(
        f"loss {loss.item():.4f}; measured peak {peak / 2**20:.1f} MiB of eager's "
        f"{eager / 2**20:.1f} MiB ({peak / eager:.0%}), planned "
        f"{100 * managed.plan.overhead:+.1f} % time"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", default="0.6", help="bytes, 4GiB, or a fraction such as 0.5")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="pixels, a multiple of 2^(depth - 1)")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds for the solver")
    return parser.parse_args()


if __name__ == "__main__":
    main()
