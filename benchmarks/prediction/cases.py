"""The models of the prediction tables, each as one module that gives the loss of a batch."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    make: Callable[[torch.device, bool], tuple[nn.Module, tuple[Tensor, ...]]]  # (device, small)


class Classifier(nn.Module):
    """Images and classes to a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images).float(), classes)


class LanguageModel(nn.Module):
    """Tokens to the loss of the next ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


class Translator(nn.Module):
    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.model = nn.Transformer(
            width, num_heads, num_layers, num_layers, 4 * width, 0.1, batch_first=True
        )

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(source, target).square().mean()


class Unet(nn.Module):
    """The usual U: two convolutions a level, batch norm, skip connections."""

    def __init__(self, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(_double(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2)
            for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.join = nn.ModuleList(_double(2 * a, a) for a in widths[-2::-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x, skips = images, []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for grow, join, skip in zip(self.up, self.join, skips[-2::-1], strict=True):
            x = join(torch.cat([skip, grow(x)], 1))
        return F.cross_entropy(self.head(x), classes)


def _double(a: int, b: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1, bias=False),
        nn.BatchNorm2d(b),
        nn.ReLU(inplace=True),
        nn.Conv2d(b, b, 3, padding=1, bias=False),
        nn.BatchNorm2d(b),
        nn.ReLU(inplace=True),
    )


def _library(name: str):
    """A library whose torchvision may be built for another torch: declaring its ops is enough."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        _kept.append(torch.library.Library("torchvision", "DEF"))
        for op in ("nms", "qnms"):
            _kept[-1].define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass
    return importlib.import_module(name)


_kept: list[torch.library.Library] = []


def _tokens(device: torch.device, vocabulary: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), device=device)


def _images(device: torch.device, batch: int, size: int, num_classes: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, size, size, device=device)
    return images, torch.randint(0, num_classes, (batch,), device=device)


def llama(device: torch.device, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    hf = _library("transformers")
    config = hf.LlamaConfig(
        hidden_size=128 if small else 2048,
        intermediate_size=256 if small else 8192,
        num_hidden_layers=2 if small else 16,
        num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8,
        vocab_size=512 if small else 128256,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16)
    batch, length = (2, 64) if small else (4, 4096)
    return LanguageModel(model), (_tokens(device, config.vocab_size, batch, length),)


def gpt2(
    device: torch.device, small: bool, num_layers: int = 24, batch: int = 8
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    hf = _library("transformers")
    config = hf.GPT2Config(
        n_layer=min(num_layers, 3) if small else num_layers,
        n_embd=64 if small else 1024,
        n_head=4 if small else 16,
        vocab_size=512 if small else 50257,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device(device):
        model = hf.GPT2LMHeadModel(config).to(torch.bfloat16 if device.type == "cuda" else None)
    batch, length = (2, 64) if small else (batch, 1024)
    return LanguageModel(model), (_tokens(device, config.vocab_size, batch, length),)


def vit(device: torch.device, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    timm = _library("timm")
    name, options = (
        ("vit_tiny_patch16_224", {"depth": 2}) if small else ("vit_large_patch16_224", {})
    )
    model = Classifier(timm.create_model(name, **options)).to(device)
    return model, _images(device, 2 if small else 64, 224, 1000)


def resnet(device: torch.device, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    models = _library("torchvision.models")
    model = Classifier(models.resnet18() if small else models.resnet101()).to(device)
    return model, _images(device, 2 if small else 64, 96 if small else 224, 1000)


def unet(device: torch.device, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    size, batch = (32, 2) if small else (256, 16)
    model = Unet(8 if small else 64, 3 if small else 5, 21).to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    return model, (images, torch.randint(0, 21, (batch, size, size), device=device))


def transformer(device: torch.device, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width, layers, heads = (64, 2, 4) if small else (512, 6, 8)
    batch, length = (2, 16) if small else (64, 128)
    model = Translator(width, layers, heads).to(device)
    shape = (batch, length, width)
    return model, (torch.randn(shape, device=device), torch.randn(shape, device=device))


def mixer(device: torch.device, small: bool) -> tuple[nn.Module, tuple[Tensor, ...]]:
    timm = _library("timm")
    name = "mixer_s32_224" if small else "mixer_b16_224"
    model = Classifier(timm.create_model(name)).to(device)
    return model, _images(device, 2 if small else 64, 224, 1000)


CASES = (
    Case("llama-1b", llama),
    Case("gpt2-medium", gpt2),
    Case("vit-large", vit),
    Case("resnet101", resnet),
    Case("unet", unet),
    Case("transformer-6-6", transformer),
    Case("mixer-b16", mixer),
)
