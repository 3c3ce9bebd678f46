"""Models for `trust.py`: what a stranger may bring, besides the models of `models.py`.

None of them is named in a test. Weights are random, made from configurations. The loss is outside
of the model, as in most training loops. `small=True` gives sizes that a CPU runs in a second or
two, to try the script itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from models import MODELS, Workload
from torch.nn import functional as F

Make = Callable[[str, bool], Workload]


# ---- losses, of what a model returns


def of_classes(targets: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Cross entropy; of auxiliary heads too, where a model has some."""

    def loss(out: Any) -> torch.Tensor:
        if isinstance(out, torch.Tensor):
            return F.cross_entropy(out, targets)
        if isinstance(out, dict) and "out" in out:  # torchvision's segmentation
            return F.cross_entropy(out["out"], targets)
        if hasattr(out, "aux_logits"):
            return F.cross_entropy(out.logits, targets) + 0.4 * F.cross_entropy(
                out.aux_logits, targets
            )
        logits = out.logits if hasattr(out, "logits") else out[0]
        return F.cross_entropy(logits, targets)

    return loss


def of_tokens(targets: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    def loss(out: Any) -> torch.Tensor:
        return F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())

    return loss


def of_squares(out: Any) -> torch.Tensor:
    """Of all that was returned: several outputs."""
    tensors = out.values() if isinstance(out, dict) else [out]
    parts = [t.float().pow(2).mean() for t in tensors if isinstance(t, torch.Tensor)]
    return torch.stack(parts).sum()


# ---- images


@dataclass(frozen=True)
class Images:
    """A model of images from timm or torchvision."""

    package: str
    name: str
    batch: int = 32
    side: int = 224
    small_side: int | None = 64  # None: it cannot be smaller
    pixels: bool = False  # a class for each pixel
    frames: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    small_options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, device: str, small: bool) -> Workload:
        side = (self.small_side or self.side) if small else self.side
        batch = 2 if small else self.batch
        options = dict(self.options) | (dict(self.small_options) if small else {})
        if self.package == "timm":
            import timm

            model = timm.create_model(self.name, num_classes=1000, **options)
        else:
            import torchvision

            kinds = torchvision.models
            if self.pixels:
                kinds = kinds.segmentation
                options |= {"weights": None, "weights_backbone": None}
            elif self.frames:
                kinds = kinds.video
            model = getattr(kinds, self.name)(**options)
        shape = (batch, 3, self.frames, side, side) if self.frames else (batch, 3, side, side)
        images = torch.randn(*shape, device=device)
        at = (batch, side, side) if self.pixels else (batch,)
        targets = torch.randint(0, 21 if self.pixels else 400, at, device=device)
        return Workload(model.to(device).train(), (images,), loss=of_classes(targets))


def timm(name: str, batch: int = 32, side: int = 224, small: int | None = 64, **more: Any) -> Make:
    options = tuple(more.items())
    return Images("timm", name, batch, side, small, small_options=options)


def sized(name: str, batch: int = 32, side: int = 224, small: int = 64) -> Make:
    """Of timm's models those that are built for one size of images."""
    return timm(name, batch, side, small, img_size=small)


def vision(name: str, batch: int = 32, side: int = 224, small: int | None = 64) -> Make:
    return Images("torchvision", name, batch, side, small)


# ---- text, sound and images from transformers


@dataclass(frozen=True)
class Language:
    """A model of transformers that reads tokens."""

    kind: str  # of the class and of the configuration: "OPT" of OPTForCausalLM and OPTConfig
    options: tuple[tuple[str, Any], ...]
    batch: int = 8
    length: int = 512
    head: str = "ForCausalLM"
    config: str = ""  # where its name is another
    dtype: str = "float32"
    cache: bool = True  # the configuration has `use_cache`
    decoder: bool = False

    def __call__(self, device: str, small: bool) -> Workload:
        import transformers

        options = dict(self.options)
        if small:
            options = {key: _small(key, value) for key, value in options.items()}
            if self.kind == "DeepseekV3":  # its attention has a key for each head
                options["num_key_value_heads"] = options["num_attention_heads"]
        if self.cache:
            options["use_cache"] = False
        config = getattr(transformers, (self.config or self.kind) + "Config")(**options)
        model = getattr(transformers, self.kind + self.head)(config)
        batch, length = (2, 32) if small else (self.batch, self.length)
        vocabulary = min(256, config.vocab_size) if small else config.vocab_size
        ids = torch.randint(3, vocabulary, (batch, length), device=device)
        model = model.to(device=device, dtype=getattr(torch, self.dtype)).train()
        kwargs = {"input_ids": ids}
        if self.decoder:
            kwargs["decoder_input_ids"] = ids.roll(1, 1)
        loss = of_squares if self.head == "Model" else of_tokens(ids)
        return Workload(model, kwargs=kwargs, loss=loss)


_SMALL_SIZES = {
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "encoder_layers": 2, "decoder_layers": 2,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64, "word_embed_proj_dim": 64,
    "intermediate_size": 128, "moe_intermediate_size": 64, "ffn_dim": 128,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_inner": 128,
    "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2, "head_dim": 16,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 256,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip


def _small(key: str, value: Any) -> Any:
    return _SMALL_SIZES.get(key, value)


def language(kind: str, head: str = "ForCausalLM", **options: Any) -> Make:
    ours = {"batch", "length", "config", "dtype", "cache", "decoder"}
    own = {key: options.pop(key) for key in ours & options.keys()}
    return Language(kind, tuple(options.items()), head=head, **own)


WIDE = {
    "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 32000, "pad_token_id": 0,
}  # fmt: skip
BERT = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "vocab_size": 30000,
    "num_attention_heads": 12,
}  # fmt: skip
EXPERTS = {
    "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 16000, "pad_token_id": 0, "batch": 4, "length": 1024,
}  # fmt: skip


def mixtral(dtype: str) -> Make:
    return language(
        "Mixtral", dtype=dtype, num_local_experts=8, num_experts_per_tok=2, intermediate_size=2048,
        **EXPERTS,
    )  # fmt: skip


def qwen3_moe(dtype: str) -> Make:
    return language(
        "Qwen3Moe", dtype=dtype, num_experts=16, num_experts_per_tok=4, head_dim=64,
        moe_intermediate_size=768, intermediate_size=2048, **EXPERTS,
    )  # fmt: skip


def gpt_oss(dtype: str) -> Make:
    return language(
        "GptOss", dtype=dtype, num_local_experts=8, num_experts_per_tok=4, head_dim=64,
        intermediate_size=1024, sliding_window=128, **EXPERTS,
    )  # fmt: skip


def deepseek_v3(dtype: str) -> Make:
    return language(
        "DeepseekV3", dtype=dtype, n_routed_experts=16, num_experts_per_tok=4, n_group=4,
        topk_group=2, moe_intermediate_size=512, intermediate_size=2048, q_lora_rank=256,
        kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        first_k_dense_replace=1, n_shared_experts=1, **{**EXPERTS, "num_key_value_heads": 16},
    )  # fmt: skip


def whisper(device: str, small: bool) -> Workload:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, layers, seconds = (64, 2, 2) if small else (384, 4, 30)
    config = WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width,
        max_source_positions=50 * seconds, use_cache=False,
        vocab_size=51865, pad_token_id=50256,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).to(device).train()
    batch = 2 if small else 8
    sound = torch.randn(batch, 80, 100 * seconds, device=device)
    ids = torch.randint(0, 50000, (batch, 64), device=device)
    kwargs = {"input_features": sound, "decoder_input_ids": ids}
    return Workload(model, kwargs=kwargs, loss=of_tokens(ids))


def wav2vec2(device: str, small: bool) -> Workload:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} if small else {}
    config = Wav2Vec2Config(apply_spec_augment=False, layerdrop=0.0, **sizes)
    model = Wav2Vec2ForCTC(config).to(device).train()
    sound = torch.randn(2 if small else 8, 8000 if small else 80000, device=device)
    return Workload(model, (sound,), loss=lambda out: of_squares(out.logits))


def seen(kind: str, head: str, side: int = 224, batch: int = 32, **options: Any) -> Make:
    """A model of transformers that sees images."""

    def make(device: str, small: bool) -> Workload:
        import transformers

        less = {key: _small(key, value) for key, value in options.items()} if small else options
        at = 64 if small else side
        sized = {"image_size": at} if "image_size" in options else {}
        config = getattr(transformers, kind + "Config")(**(less | sized))
        model = getattr(transformers, kind + head)(config).to(device).train()
        images = torch.randn(2 if small else batch, 3, at, at, device=device)
        return Workload(model, (images,), loss=of_squares)

    return make


def clip(device: str, small: bool) -> Workload:
    """Two inputs, and a loss of two outputs."""
    from transformers import CLIPConfig, CLIPModel

    layers = 2 if small else 8
    model = CLIPModel(CLIPConfig(
        text_config={"num_hidden_layers": layers, "vocab_size": 1000, "eos_token_id": 2},
        vision_config={"num_hidden_layers": layers, "image_size": 64 if small else 224},
    ))  # fmt: skip
    batch = 2 if small else 64
    kwargs = {
        "input_ids": torch.randint(3, 1000, (batch, 32), device=device),
        "pixel_values": torch.randn(batch, 3, *([64 if small else 224] * 2), device=device),
    }
    pairs = torch.arange(batch, device=device)

    def loss(out: Any) -> torch.Tensor:
        return F.cross_entropy(out.logits_per_text, pairs) + F.cross_entropy(
            out.logits_per_image, pairs
        )

    return Workload(model.to(device).train(), kwargs=kwargs, loss=loss)


# ---- the models of the comparison, their loss taken out


def outside(make: Make) -> Make:
    def made(device: str, small: bool) -> Workload:
        load = make(device, small)
        if not load.loss_inside:
            return load
        kwargs = dict(load.kwargs)
        labels = kwargs.pop("labels")
        if hasattr(load.model.config, "decoder_start_token_id") and hasattr(load.model, "decoder"):
            kwargs["decoder_input_ids"] = labels.roll(1, 1)
        return replace(load, kwargs=kwargs, loss=of_tokens(labels), loss_inside=False)

    return made


# What was above its budget, or ended the process, when it was found.
FOUND: dict[str, Make] = {
    "mixtral-bf16": mixtral("bfloat16"),
    "qwen3-moe-bf16": qwen3_moe("bfloat16"),
    "gpt-oss-bf16": gpt_oss("bfloat16"),
    "deepseek-v3-bf16": deepseek_v3("bfloat16"),
    "lraspp_mobilenet_v3_large": Images(
        "torchvision", "lraspp_mobilenet_v3_large", 4, 256, 64, pixels=True
    ),
    "xcit_small_12_p16_224": timm("xcit_small_12_p16_224"),
    "shufflenet_v2_x1_0": vision("shufflenet_v2_x1_0", 128),
    "poolformer_s24": timm("poolformer_s24"),
    "res2net101_26w_4s": timm("res2net101_26w_4s"),
    "twins_pcpvt_small": timm("twins_pcpvt_small"),
    "pnasnet5large": timm("pnasnet5large", 8, 331, 96),
    "mixtral-fp32": mixtral("float32"),
    "qwen3-moe-fp32": qwen3_moe("float32"),
    "gpt-oss-fp32": gpt_oss("float32"),
    "deepseek-v3-fp32": deepseek_v3("float32"),
}
EXPERT_MODELS = {name for name in FOUND if name.endswith(("-bf16", "-fp32"))}

FURTHER: dict[str, Make] = {
    "opt": language("OPT", hidden_size=768, num_hidden_layers=8, ffn_dim=3072, vocab_size=32000,
                    num_attention_heads=12, word_embed_proj_dim=768, dropout=0.1),
    "mobilenet_v2": vision("mobilenet_v2", 96),
    "coat_tiny": timm("coat_tiny", 32, small=None),
    "gemma2": language("Gemma2", head_dim=64, dtype="bfloat16", **WIDE),
    # Its positions begin after the padding token's: 512 of them hold 510 tokens.
    "roberta": language("Roberta", "ForMaskedLM", length=256, **BERT),
    "fcn_resnet50": Images("torchvision", "fcn_resnet50", 4, 256, 64, pixels=True),
    "maxvit_tiny_tf_224": timm("maxvit_tiny_tf_224", 24, small=None),
    "whisper-tiny": whisper,
    "efficientnetv2_rw_s": timm("efficientnetv2_rw_s", 32),
    "segformer": seen("Segformer", "ForSemanticSegmentation", 256, 16),
    "bloom": language("Bloom", hidden_size=768, n_layer=8, n_head=12, vocab_size=32000),
    "swin_v2_t": vision("swin_v2_t", 32, small=None),
    "deberta-v2": language("DebertaV2", "ForMaskedLM", cache=False, relative_attention=True,
                           pos_att_type=["p2c", "c2p"], **BERT),
    "cait_s24_224": sized("cait_s24_224"),
    "levit_256": timm("levit_256", 128, small=None),
    "pvt_v2_b1": timm("pvt_v2_b1"),
    "deeplabv3_mobilenet_v3_large": Images(
        "torchvision", "deeplabv3_mobilenet_v3_large", 8, 256, 64, pixels=True
    ),
    "phi3": language("Phi3", **WIDE),
    "hrnet_w18": timm("hrnet_w18"),
    "bart": language("Bart", "ForConditionalGeneration", d_model=512, encoder_layers=4,
                     decoder_layers=4, encoder_ffn_dim=2048, decoder_ffn_dim=2048,
                     encoder_attention_heads=8, decoder_attention_heads=8, vocab_size=32000,
                     decoder=True),
    "wav2vec2": wav2vec2,
    "ghostnetv2_100": timm("ghostnetv2_100", 64),
    "dla34": timm("dla34", 64),
    "gpt-neox": language("GPTNeoX", dtype="bfloat16", hidden_size=768, intermediate_size=3072,
                         num_hidden_layers=8, num_attention_heads=12, vocab_size=32000),
    "nfnet_l0": timm("nfnet_l0", 32),
    "clip": clip,
    "volo_d1_224": sized("volo_d1_224", 16),
    "r3d_18": Images("torchvision", "r3d_18", 8, 112, 64, frames=16),
    "convmixer_768_32": timm("convmixer_768_32", 16),
    "olmo2": language("Olmo2", **WIDE),
    "crossvit_9_240": timm("crossvit_9_240", 32, 240, None),
    "beit_base_patch16_224": sized("beit_base_patch16_224"),
    "albert": language("Albert", "ForMaskedLM", cache=False, embedding_size=128, **BERT),
    "focalnet_tiny_srf": timm("focalnet_tiny_srf"),
    "gcvit_xtiny": timm("gcvit_xtiny", 32, small=None),
    "inception_v4": timm("inception_v4", 32, 299, 96),
    "dinov2": seen("Dinov2", "Model", 224, 32, hidden_size=384, num_hidden_layers=8,
                   num_attention_heads=6, image_size=224, patch_size=16),
    "mvitv2_tiny": timm("mvitv2_tiny", 32, small=None),
    "rexnet_100": timm("rexnet_100", 64),
    "stablelm": language("StableLm", **WIDE),
    "googlenet": vision("googlenet", 64),
    "davit_tiny": timm("davit_tiny", 32),
    "xlnet": language("XLNet", "LMHeadModel", cache=False, d_model=512, n_layer=6, n_head=8,
                      d_inner=2048, vocab_size=32000, length=256),
    "pit_s_224": timm("pit_s_224", 64, small=None),
    "visformer_small": timm("visformer_small", 48, small=None),
    "tnt_s_patch16_224": timm("tnt_s_patch16_224", 24, small=None),
    "mobilevitv2_100": timm("mobilevitv2_100", 48),
    "starcoder2": language("Starcoder2", dtype="bfloat16", **WIDE),
    "fastvit_t8": timm("fastvit_t8", 64, small=128),
    "hiera_tiny_224": timm("hiera_tiny_224", 32, small=None),
    "squeezenet1_1": vision("squeezenet1_1", 128),
    "dpn68": timm("dpn68", 48),
    "resmlp_12_224": timm("resmlp_12_224", 64, small=None),
    "electra": language("Electra", "ForMaskedLM", cache=False, embedding_size=128, **BERT),
    "sequencer2d_s": timm("sequencer2d_s", 16, small=None),
    "repvgg_b0": timm("repvgg_b0", 64),
    "regnety_032": timm("regnety_032", 48),
    "mnasnet1_0": vision("mnasnet1_0", 96),
    "falcon": language("Falcon", hidden_size=768, num_hidden_layers=8, num_attention_heads=12,
                       vocab_size=32000),
}  # fmt: skip

# The most important first; those of the comparison whose step takes more than 200 ms last.
LONG = {"llama-1b-4x4096", "llama-1b-1x16384", "regnet-x-32gf", "resnet1001", "transformer-36-36"}
_compared = {name: outside(make) for name, make in MODELS.items()}
ALL: dict[str, Make] = {
    **FOUND,
    **{name: make for name, make in _compared.items() if name not in LONG},
    **FURTHER,
    **{name: make for name, make in _compared.items() if name in LONG},
}
