"""More models, and other ways to call those of the zoo, than every change need be tested on."""

from typing import Any

import torch
from support.zoo import (
    BATCH,
    LENGTH,
    LLAMA_LIKE,
    VOCABULARY,
    Case,
    Example,
    Inputs,
    gaussian,
    image_model,
    language_model,
    mean_square,
    own_loss,
    prepared,
    require,
    tokens,
)
from torch import Tensor, nn

SMALL_GPT2 = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}


def make_gpt2(device: torch.device, **options: Any) -> Example:
    return language_model("GPT2LMHeadModel", "GPT2Config", **SMALL_GPT2, **options)(device)


def make_gpt2_with_its_own_recomputation(device: torch.device) -> Example:
    example = make_gpt2(device, use_cache=False)
    example.model.gradient_checkpointing_enable()
    return example


def make_padded_llama(device: torch.device) -> Example:
    example = language_model("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE)(device)

    def inputs(step: int) -> Inputs:
        ids = tokens(step, device, VOCABULARY, BATCH, LENGTH)
        mask = torch.ones_like(ids)
        mask[0, : LENGTH // 4] = 0
        return (), {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}

    return Example(example.model, inputs, own_loss, own_loss=True)


def make_llama_on_embeddings(device: torch.device) -> Example:
    example = language_model("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE)(device)

    def inputs(step: int) -> Inputs:
        embeds = gaussian(step, device, BATCH, LENGTH, 64, requires_grad=True)
        labels = tokens(step, device, VOCABULARY, BATCH, LENGTH)
        return (), {"inputs_embeds": embeds, "labels": labels, "output_hidden_states": True}

    return Example(example.model, inputs, own_loss, own_loss=True)


def make_talkative_bert(device: torch.device) -> Example:
    """All hidden states and attention weights as outputs, the explicit attention."""
    transformers = require("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    model = transformers.BertForMaskedLM(config)

    def inputs(step: int) -> Inputs:
        ids = tokens(step, device, VOCABULARY, BATCH, LENGTH)
        options = {"output_hidden_states": True, "output_attentions": True}
        return (ids,), {"labels": ids.clone(), **options}

    return Example(prepared(model, device), inputs, own_loss, own_loss=True)


def make_mixtral(device: torch.device) -> Example:
    options = {**LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}
    return language_model("MixtralForCausalLM", "MixtralConfig", **options)(device)


def make_peft(device: torch.device) -> Example:
    peft = require("peft")
    example = make_gpt2(device, use_cache=False)
    config = peft.LoraConfig(
        r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.1, fan_in_fan_out=True
    )
    model = peft.get_peft_model(example.model, config)
    return Example(prepared(model, device), example.inputs, own_loss, own_loss=True)


def make_gru(device: torch.device) -> Example:
    dropout = 0.1 if device.type == "cpu" else 0.0  # cuDNN's own is refused: its state is hidden
    model = nn.GRU(16, 16, num_layers=2, bidirectional=True, dropout=dropout)

    def inputs(step: int) -> Inputs:
        x = gaussian(step, device, 6, 4, 16, requires_grad=True)
        return (x, gaussian(step + 50, device, 4, 4, 16, requires_grad=True)), {}

    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        return output[0].square().mean() + output[1].square().mean()

    return Example(prepared(model, device), inputs, loss)


def make_conditional_unet(device: torch.device) -> Example:
    model = require("diffusers").UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
    )

    def inputs(step: int) -> Inputs:
        x = gaussian(step, device, 2, 4, 8, 8)
        return (x, torch.tensor([3, 7], device=device)), {
            "encoder_hidden_states": gaussian(step + 50, device, 2, 5, 16, requires_grad=True)
        }

    return Example(prepared(model, device), inputs, lambda out: mean_square(out.sample))


def make_autoencoder(device: torch.device) -> Example:
    model = require("diffusers").AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
    )

    def inputs(step: int) -> Inputs:
        return (gaussian(step, device, 1, 3, 16, 16, requires_grad=True),), {
            "sample_posterior": True
        }

    return Example(prepared(model, device), inputs, lambda out: mean_square(out.sample))


def make_tfno(device: torch.device) -> Example:
    model = require("neuralop").models.TFNO(
        n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2, rank=0.5
    )

    def inputs(step: int) -> Inputs:
        return (gaussian(step, device, 2, 1, 16, 16, requires_grad=True),), {}

    return Example(prepared(model, device), inputs, mean_square)


def timm_model(name: str, size: int = 64, **options: Any):
    def build() -> nn.Module:
        return require("timm").create_model(name, num_classes=10, **options)

    return image_model(build, batch=2, size=size)


def build_fcn() -> nn.Module:
    models = require("torchvision").models
    return models.segmentation.fcn_resnet50(
        weights=None, weights_backbone=None, num_classes=3, aux_loss=True
    )


def make_segmentation(device: torch.device) -> Example:
    def inputs(step: int) -> Inputs:
        return (gaussian(step, device, 2, 3, 32, 32),), {}

    def loss(output: dict[str, Tensor]) -> Tensor:
        return mean_square(output["out"]) + 0.4 * mean_square(output["aux"])

    return Example(prepared(build_fcn(), device), inputs, loss, optimizer="sgd")


TRANSFORMERS, TIMM, VISION = ("transformers",), ("timm",), ("torchvision",)
FURTHER = (
    Case("gpt2-with-cache", make_gpt2, TRANSFORMERS),
    Case("gpt2-recomputing", make_gpt2_with_its_own_recomputation, TRANSFORMERS),
    Case("gpt2-peft", make_peft, ("transformers", "peft")),
    Case("llama-padded", make_padded_llama, TRANSFORMERS),
    Case("llama-embeddings", make_llama_on_embeddings, TRANSFORMERS),
    Case("bert-talkative", make_talkative_bert, TRANSFORMERS),
    Case("gru", make_gru),
    Case("unet2d-condition", make_conditional_unet, ("diffusers",)),
    Case("autoencoder-kl", make_autoencoder, ("diffusers",)),
    Case("tfno", make_tfno, ("neuralop",)),
    Case("fcn-resnet50", make_segmentation, VISION),
    Case("swin", timm_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4), TIMM),
    Case(
        "vit-drop-path", timm_model("vit_tiny_patch16_224", img_size=64, drop_path_rate=0.2), TIMM
    ),
    Case("efficientnet-b0", timm_model("efficientnet_b0", drop_path_rate=0.2), TIMM),
    Case("regnety", timm_model("regnety_002"), TIMM),
    Case("mixer", timm_model("mixer_s32_224", img_size=64), TIMM),
    Case("convnext", timm_model("convnext_atto", drop_path_rate=0.1), TIMM),
    Case("mobilenet-v3", timm_model("mobilenetv3_small_050", drop_rate=0.1), TIMM),
)
