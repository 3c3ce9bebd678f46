"""The models that a managed module must equal eager on, in small configurations, random weights.

Each entry builds a fresh model (always with the same weights), inputs that differ from step to
step, and a loss: the model's own or one of the caller's. Dropout is on where the model has it.
A library that is missing skips the test, and fails it where the variable CI is set.
"""

import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import small_models
from torch import Tensor, nn

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Example:
    """A model, what it is called with at each step, and what is made of its output."""

    model: nn.Module
    inputs: Callable[[int], Inputs]
    loss: Callable[[Any], Tensor]
    own_loss: bool = False  # the output carries the loss (`output.loss`)
    optimizer: str = "adamw"

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(trained, lr=1e-3)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    make: Callable[[torch.device], Example]
    needs: tuple[str, ...] = field(default=())

    def build(self, device: torch.device | str = "cpu") -> Example:
        for library in self.needs:
            require(library)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries say of their own configurations
            return self.make(torch.device(device))


def require(library: str) -> ModuleType:
    """The library; without it a skip, or a failure where CI is set: there it must be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(library)
    except ImportError as error:
        if os.environ.get("CI"):
            pytest.fail(f"{library} must be installed where CI is set: {error}")
        pytest.skip(f"{library} is not installed")


def generator(step: int) -> torch.Generator:
    """The source of a step's data; the global stream is left to the models."""
    return torch.Generator().manual_seed(100 + step)


def tokens(step: int, device: torch.device, vocabulary: int, *shape: int) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=generator(step)).to(device)


def gaussian(step: int, device: torch.device, *shape: int, requires_grad: bool = False) -> Tensor:
    x = torch.randn(shape, generator=generator(step)).to(device)
    return x.requires_grad_(requires_grad)


def prepared(model: nn.Module, device: torch.device) -> nn.Module:
    return model.to(device).train()


def own_loss(output: Any) -> Tensor:
    return output.loss


def cross_entropy(num_classes: int) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        logits = logits.reshape(-1, num_classes)
        target = torch.arange(len(logits), device=logits.device) % num_classes
        return F.cross_entropy(logits, target)

    return loss


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


# transformers ----------------------------------------------------------------------------------

VOCABULARY, LENGTH, BATCH = 128, 32, 2


def language_model(model_class: str, config_class: str, **options: Any) -> Callable[..., Example]:
    def make(device: torch.device) -> Example:
        transformers = require("transformers")
        config = getattr(transformers, config_class)(vocab_size=VOCABULARY, **options)
        model = getattr(transformers, model_class)(config)

        def inputs(step: int) -> Inputs:
            ids = tokens(step, device, VOCABULARY, BATCH, LENGTH)
            return (), {"input_ids": ids, "labels": ids.clone()}

        return Example(prepared(model, device), inputs, own_loss, own_loss=True)

    return make


LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    "use_cache": False,
}


def make_bert(device: torch.device) -> Example:
    transformers = require("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = transformers.BertForSequenceClassification(config)

    def inputs(step: int) -> Inputs:
        ids = tokens(step, device, VOCABULARY, BATCH, LENGTH)
        mask = torch.ones_like(ids)
        mask[1, LENGTH // 2 :] = 0  # a padded sequence
        labels = tokens(step, device, 2, BATCH)
        return (), {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return Example(prepared(model, device), inputs, own_loss, own_loss=True)


def make_t5(device: torch.device) -> Example:
    transformers = require("transformers")
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)

    def inputs(step: int) -> Inputs:
        ids = tokens(step, device, VOCABULARY, BATCH, LENGTH)
        labels = tokens(step + 50, device, VOCABULARY, BATCH, LENGTH // 2)
        return (), {"input_ids": ids, "labels": labels}

    return Example(prepared(model, device), inputs, own_loss, own_loss=True)


def make_vit(device: torch.device) -> Example:
    transformers = require("transformers")
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    model = transformers.ViTForImageClassification(config)

    def inputs(step: int) -> Inputs:
        pixels = gaussian(step, device, 4, 3, 32, 32, requires_grad=True)
        return (), {"pixel_values": pixels, "labels": tokens(step, device, 10, 4)}

    return Example(prepared(model, device), inputs, own_loss, own_loss=True)


# torchvision and other image models ------------------------------------------------------------


def image_model(
    build: Callable[[], nn.Module], batch: int = 4, size: int = 32, optimizer: str = "sgd"
) -> Callable[[torch.device], Example]:
    def make(device: torch.device) -> Example:
        def inputs(step: int) -> Inputs:
            return (gaussian(step, device, batch, 3, size, size, requires_grad=True),), {}

        return Example(prepared(build(), device), inputs, cross_entropy(10), optimizer=optimizer)

    return make


def build_resnet18() -> nn.Module:
    return require("torchvision").models.resnet18(num_classes=10)


def build_mobilenet_v3() -> nn.Module:
    module = require("torchvision").models.mobilenetv3

    def block(into: int, kernel: int, wide: int, out: int, excite: bool, act: str, stride: int):
        return module.InvertedResidualConfig(
            into, kernel, wide, out, excite, act, stride, 1, width_mult=1.0
        )

    blocks = [
        block(16, 3, 16, 16, True, "RE", 2),
        block(16, 3, 48, 24, False, "RE", 1),
        block(24, 5, 64, 24, True, "HS", 1),
        block(24, 5, 96, 32, True, "HS", 2),
    ]
    return module.MobileNetV3(blocks, last_channel=64, num_classes=10, dropout=0.2)


def build_densenet() -> nn.Module:
    return require("torchvision").models.DenseNet(
        growth_rate=8,
        block_config=(2, 3, 2),
        num_init_features=16,
        bn_size=2,
        drop_rate=0.1,
        num_classes=10,
    )


def build_efficientnet() -> nn.Module:
    module = require("torchvision").models.efficientnet

    def block(expand: int, kernel: int, stride: int, into: int, out: int, layers: int):
        return module.MBConvConfig(expand, kernel, stride, into, out, layers)

    blocks = [block(1, 3, 1, 16, 16, 1), block(4, 3, 2, 16, 24, 2), block(4, 5, 2, 24, 32, 2)]
    return module.EfficientNet(
        blocks, dropout=0.2, stochastic_depth_prob=0.3, num_classes=10, last_channel=64
    )


def build_regnet() -> nn.Module:
    module = require("torchvision").models.regnet
    params = module.BlockParams.from_init_params(
        depth=4, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25
    )
    return module.RegNet(params, num_classes=10, stem_width=16)


def build_convnext() -> nn.Module:
    module = require("torchvision").models.convnext
    blocks = [
        module.CNBlockConfig(16, 32, 1),
        module.CNBlockConfig(32, 64, 2),
        module.CNBlockConfig(64, None, 1),
    ]
    return module.ConvNeXt(blocks, stochastic_depth_prob=0.2, num_classes=10)


def make_unet(device: torch.device) -> Example:
    def inputs(step: int) -> Inputs:
        return (gaussian(step, device, 2, 3, 32, 32, requires_grad=True),), {}

    model = small_models.UNet(3, 1, 8)
    return Example(prepared(model, device), inputs, mean_square, optimizer="sgd")


def make_diffusion_unet(device: torch.device) -> Example:
    model = require("diffusers").UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        dropout=0.1,
    )

    def inputs(step: int) -> Inputs:
        timestep = torch.tensor([3, 7], device=device)
        return (gaussian(step, device, 2, 3, 16, 16), timestep), {}

    def loss(output: Any) -> Tensor:
        return output.sample.square().mean()

    return Example(prepared(model, device), inputs, loss)


# torch itself, operators, experts, frozen weights ----------------------------------------------


def make_transformer(device: torch.device) -> Example:
    model = nn.Transformer(
        d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128
    )

    def inputs(step: int) -> Inputs:
        source = gaussian(step, device, 12, BATCH, 64, requires_grad=True)
        return (source, gaussian(step + 50, device, 10, BATCH, 64, requires_grad=True)), {}

    return Example(prepared(model, device), inputs, mean_square)


def make_lstm(device: torch.device) -> Example:
    # cuDNN's own dropout between layers is refused by name: see test_recurrent.
    dropout = 0.0 if device.type == "cuda" else 0.2
    model = nn.LSTM(16, 32, num_layers=2, dropout=dropout, batch_first=True)

    def inputs(step: int) -> Inputs:
        return (gaussian(step, device, 4, 8, 16, requires_grad=True),), {}

    def loss(output: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
        sequence, (hidden, cell) = output
        return sequence.square().mean() + hidden.sum() + cell.mean()

    return Example(prepared(model, device), inputs, loss)


def make_fno(device: torch.device) -> Example:
    model = require("neuralop").models.FNO(
        n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2
    )

    def inputs(step: int) -> Inputs:
        return (gaussian(step, device, 2, 1, 16, 16, requires_grad=True),), {}

    return Example(prepared(model, device), inputs, mean_square)


def make_uno(device: torch.device) -> Example:
    model = require("neuralop").models.UNO(
        in_channels=1,
        out_channels=1,
        hidden_channels=8,
        uno_out_channels=[8, 8, 8],
        uno_n_modes=[[4, 4], [4, 4], [4, 4]],
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2, 2]],
        n_layers=3,
        channel_mlp_skip="linear",
    )

    def inputs(step: int) -> Inputs:
        return (gaussian(step, device, 2, 1, 16, 16),), {}

    return Example(prepared(model, device), inputs, mean_square)


def sequence_model(build: Callable[[], nn.Module]) -> Callable[[torch.device], Example]:
    def make(device: torch.device) -> Example:
        def inputs(step: int) -> Inputs:
            return (gaussian(step, device, BATCH, 16, 32, requires_grad=True),), {}

        return Example(prepared(build(), device), inputs, mean_square)

    return make


CASES = (
    Case(
        "gpt2",
        language_model(
            "GPT2LMHeadModel", "GPT2Config", n_positions=64, n_embd=64, n_layer=2, n_head=4
        ),
        ("transformers",),
    ),
    Case(
        "llama", language_model("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE), ("transformers",)
    ),
    Case(
        "qwen3",
        language_model("Qwen3ForCausalLM", "Qwen3Config", head_dim=16, **LLAMA_LIKE),
        ("transformers",),
    ),
    Case(
        "mistral",
        language_model("MistralForCausalLM", "MistralConfig", sliding_window=8, **LLAMA_LIKE),
        ("transformers",),
    ),
    Case("bert", make_bert, ("transformers",)),
    Case("t5", make_t5, ("transformers",)),
    Case("vit", make_vit, ("transformers",)),
    Case("resnet18", image_model(build_resnet18), ("torchvision",)),
    Case("mobilenet-v3", image_model(build_mobilenet_v3), ("torchvision",)),
    Case("densenet", image_model(build_densenet), ("torchvision",)),
    Case("efficientnet", image_model(build_efficientnet), ("torchvision",)),
    Case("regnet", image_model(build_regnet), ("torchvision",)),
    Case("convnext", image_model(build_convnext, optimizer="adamw"), ("torchvision",)),
    Case("unet", make_unet),
    Case("mlp-mixer", image_model(lambda: small_models.MLPMixer(32, 8, 32, 2, 10))),
    Case("transformer", make_transformer),
    Case("lstm", make_lstm),
    Case("fno", make_fno, ("neuralop",)),
    Case("uno", make_uno, ("neuralop",)),
    Case("fourier", sequence_model(lambda: small_models.FourierNet(32, 5))),
    Case("diffusion-unet", make_diffusion_unet, ("diffusers",)),
    Case("lora", sequence_model(lambda: small_models.LoRAStack(32, 4, 3))),
    Case("experts", sequence_model(lambda: small_models.ExpertStack(32, 4, 2))),
)
BY_NAME = {case.name: case for case in CASES}
