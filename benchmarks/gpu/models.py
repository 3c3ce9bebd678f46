"""The models of the GPU comparison: name -> what is trained, on what, and how its blocks are found.

Weights are random, made from configurations. `small=True` gives a configuration that runs on a CPU
in a second, to try the script itself.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Workload:
    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] = lambda out: out.loss
    loss_inside: bool = False  # the model returns its loss; the step keeps nothing else it returns
    enable_own: Callable[[nn.Module], None] | None = None  # the model's own block switch
    blocks: Callable[[nn.Module], list[nn.Module]] | None = None  # its repeated blocks


def _tokens(vocabulary: int, batch: int, length: int, device: str) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), device=device)


def _hf_switch(model: nn.Module) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _llama(device: str, small: bool, batch: int = 4, length: int = 4096) -> Workload:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64 if small else 2048,
        intermediate_size=128 if small else 8192,
        num_hidden_layers=2 if small else 16,
        num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        vocab_size=256 if small else 32000,
        max_position_embeddings=length,
        use_cache=False,
    )
    if small:
        batch, length = 2, 32
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = _tokens(config.vocab_size, batch, length, device)
    return Workload(
        model,
        kwargs={"input_ids": ids, "labels": ids},
        loss_inside=True,
        enable_own=_hf_switch,
        blocks=lambda m: list(m.model.layers),
    )


def _gpt2(
    device: str, small: bool, layers: int = 24, attention: str = "eager", dtype: str = "float32",
    batch: int = 4, length: int = 512,
) -> Workload:  # fmt: skip
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2 if small else layers,
        n_embd=64 if small else 1024,
        n_head=4 if small else 16,
        vocab_size=256 if small else 50257,
        attn_implementation=attention,
        use_cache=False,
    )
    if small:
        batch, length = 2, 32
    with torch.device(device):
        model = GPT2LMHeadModel(config).to(getattr(torch, dtype)).train()
    ids = _tokens(config.vocab_size, batch, length, device)
    return Workload(
        model,
        kwargs={"input_ids": ids, "labels": ids},
        loss_inside=True,
        enable_own=_hf_switch,
        blocks=lambda m: list(m.transformer.h),
    )


def _t5(device: str, small: bool) -> Workload:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=64 if small else 768,
        d_ff=128 if small else 3072,
        d_kv=16 if small else 64,
        num_layers=2 if small else 12,
        num_heads=4 if small else 12,
        vocab_size=256 if small else 32128,
        decoder_start_token_id=0,
        use_cache=False,
    )
    with torch.device(device):
        model = T5ForConditionalGeneration(config).train()
    batch, length = (2, 16) if small else (16, 512)
    ids = _tokens(config.vocab_size, batch, length, device)
    return Workload(
        model,
        kwargs={"input_ids": ids, "labels": ids},
        loss_inside=True,
        enable_own=_hf_switch,
    )


def _images(device: str, batch: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.randn(batch, 3, side, side, device=device),
        torch.randint(0, 1000, (batch,), device=device),
    )


def _classifier(model: nn.Module, device: str, batch: int, side: int, **more: Any) -> Workload:
    images, targets = _images(device, batch, side)
    return Workload(
        model.to(device).train(),
        args=(images,),
        loss=lambda out: F.cross_entropy(out, targets),
        **more,
    )


def _timm(device: str, small: bool, name: str, tiny: str, batch: int) -> Workload:
    import timm

    model = timm.create_model(tiny if small else name)

    def blocks(m: nn.Module) -> list[nn.Module]:
        if hasattr(m, "stages"):
            return [block for stage in m.stages for block in stage.blocks]
        return list(m.blocks)

    return _classifier(
        model, device, 2 if small else batch, 224,
        enable_own=lambda m: m.set_grad_checkpointing(), blocks=blocks,
    )  # fmt: skip


def _torchvision(device: str, small: bool, name: str, tiny: str, batch: int) -> Workload:
    import torchvision

    model = getattr(torchvision.models, tiny if small else name)()

    def blocks(m: nn.Module) -> list[nn.Module]:
        if name.startswith("resnet"):
            stages = [m.layer1, m.layer2, m.layer3, m.layer4]
            return [block for stage in stages for block in stage]
        return [block for stage in m.trunk_output for block in stage]

    return _classifier(model, device, 2 if small else batch, 64 if small else 224, blocks=blocks)


class PreActBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return x + self.conv2(F.relu(self.norm2(y)))


def _deep_resnet(device: str, small: bool) -> Workload:
    """A pre-activation ResNet for small images; 500 blocks make 1001 layers."""
    num_blocks = 4 if small else 500
    blocks = [PreActBlock(16) for _ in range(num_blocks)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000),
    )  # fmt: skip
    return _classifier(
        model, device, 2 if small else 128, 32,
        blocks=lambda m: [b for b in m if isinstance(b, PreActBlock)],
    )  # fmt: skip


class ConvPair(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(zip((3, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(ConvPair(a, b) for a, b in pairs)
        self.rise = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(ConvPair(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for rise, block in zip(reversed(self.rise), reversed(self.up), strict=True):
            x = block(torch.cat([skips.pop(), rise(x)], dim=1))
        return self.head(x)


def _unet(device: str, small: bool) -> Workload:
    model = UNet((8, 16, 32) if small else (32, 64, 128, 256, 512)).to(device).train()
    batch, side = (2, 32) if small else (32, 256)
    x = torch.randn(batch, 3, side, side, device=device)
    y = torch.rand(batch, 1, side, side, device=device)
    return Workload(
        model, args=(x,), loss=lambda out: F.binary_cross_entropy_with_logits(out, y),
        blocks=lambda m: [*m.down, *m.up],
    )  # fmt: skip


def _transformer(device: str, small: bool, layers: int = 6) -> Workload:
    layers, width, heads = (1, 32, 2) if small else (layers, 512, 8)
    model = nn.Transformer(
        width, heads, layers, layers, dim_feedforward=4 * width, batch_first=True, device=device
    ).train()
    batch, length = (2, 8) if small else (64, 200)
    source = torch.randn(batch, length, width, device=device)
    target = torch.randn(batch, length, width, device=device)
    return Workload(
        model, args=(source, target), loss=lambda out: out.square().mean(),
        blocks=lambda m: [*m.encoder.layers, *m.decoder.layers],
    )  # fmt: skip


class SpectralConv(nn.Module):
    """The low Fourier modes of a 3d field, mixed by learned complex weights."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        scale = 1 / width**2
        self.weight = nn.Parameter(
            scale * torch.rand(4, width, width, modes, modes, modes, dtype=torch.cfloat)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.modes
        spectrum = torch.fft.rfftn(x, dim=(-3, -2, -1))
        out = torch.zeros_like(spectrum)
        low, high = slice(None, m), slice(-m, None)
        for k, (a, b) in enumerate([(low, low), (high, low), (low, high), (high, high)]):
            part = spectrum[:, :, a, b, :m]
            out[:, :, a, b, :m] = torch.einsum("bixyz,ioxyz->boxyz", part, self.weight[k])
        return torch.fft.irfftn(out, s=x.shape[-3:], dim=(-3, -2, -1))


class FNO3d(nn.Module):
    def __init__(self, width: int, modes: int, num_layers: int = 4) -> None:
        super().__init__()
        self.lift = nn.Conv3d(4, width, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(num_layers))
        self.local = nn.ModuleList(nn.Conv3d(width, width, 1) for _ in range(num_layers))
        self.head = nn.Sequential(nn.Conv3d(width, 128, 1), nn.GELU(), nn.Conv3d(128, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.head(x)


def _fno3d(device: str, small: bool) -> Workload:
    model = FNO3d(8, 4).to(device).train() if small else FNO3d(32, 12).to(device).train()
    shape = (1, 4, 16, 16, 16) if small else (4, 4, 64, 64, 64)
    x = torch.randn(*shape, device=device)
    return Workload(model, args=(x,), loss=lambda out: out.square().mean())


def _diffusion(device: str, small: bool) -> Workload:
    """A denoiser of images with attention at its two lowest resolutions; needs diffusers."""
    from diffusers import UNet2DModel

    plain, attentive = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    model = UNet2DModel(
        sample_size=16 if small else 64,
        layers_per_block=1 if small else 2,
        block_out_channels=(32, 64) if small else (128, 256, 256, 512),
        down_block_types=plain if small else (plain[0], plain[0], plain[1], plain[1]),
        up_block_types=attentive if small else (*attentive[:1] * 2, *attentive[1:] * 2),
        norm_num_groups=8 if small else 32,
    )
    batch, side = (2, 16) if small else (32, 64)
    x = torch.randn(batch, 3, side, side, device=device)
    noise = torch.randn_like(x)
    steps = torch.randint(0, 1000, (batch,), device=device)
    return Workload(
        model.to(device).train(), args=(x, steps),
        loss=lambda out: (out.sample - noise).square().mean(),
        enable_own=lambda m: m.enable_gradient_checkpointing(),
        blocks=lambda m: [*m.down_blocks, m.mid_block, *m.up_blocks],
    )  # fmt: skip


MODELS: dict[str, Callable[[str, bool], Workload]] = {
    "llama-1b-4x4096": _llama,
    "llama-1b-1x16384": lambda d, s: _llama(d, s, batch=1, length=16384),
    "gpt2-medium-fp32-eager": _gpt2,
    "gpt2-medium-bf16-sdpa": lambda d, s: _gpt2(
        d, s, attention="sdpa", dtype="bfloat16", batch=16, length=1024
    ),
    "gpt2-96-layers": lambda d, s: _gpt2(d, s, layers=96, attention="sdpa", dtype="bfloat16"),
    "vit-large": lambda d, s: _timm(d, s, "vit_large_patch16_224", "vit_tiny_patch16_224", 64),
    "mixer-b16": lambda d, s: _timm(d, s, "mixer_b16_224", "mixer_s32_224", 64),
    "convnext-base": lambda d, s: _timm(d, s, "convnext_base", "convnext_atto", 64),
    "resnet101": lambda d, s: _torchvision(d, s, "resnet101", "resnet18", 64),
    "resnet1001": _deep_resnet,
    "regnet-x-32gf": lambda d, s: _torchvision(d, s, "regnet_x_32gf", "regnet_x_400mf", 32),
    "unet": _unet,
    "transformer-6-6": _transformer,
    "transformer-36-36": lambda d, s: _transformer(d, s, layers=36),
    "fno3d": _fno3d,
    "t5-base": _t5,
    "diffusion-unet": _diffusion,
}
