"""Captures the 23 models of FastSA's D.5 as problems with unit costs, one file per model.

    capture_models.py FOLDER [NAME ...]

Public configurations, random weights, nothing downloaded: the models live on the meta device, so
that a 7B model needs no memory. Batch 512 at 224 x 224 for vision; 128 x 512 tokens for text with a
classification head; 8 x 2048 (GPT-2 8 x 1024) for language models, also with a classification head.
The captured ops are eager's own kernels, views folded into them; the paper traced decomposed ops,
so its graphs have more nodes. Every op costs 1.
"""

import sys
from pathlib import Path

import torch

from rekindle.core import Op, Problem, Value, check_problem, write_problem
from rekindle.pipeline import captured
from rekindle.plans.options import Options
from rekindle.program import analyse

# name -> (kind, full name, |N| and |V| of the paper)
MODELS = {
    "vgg11": ("timm", "vgg11", 69, 119),
    "resnet18": ("timm", "resnet18", 171, 437),
    "convnext": ("timm", "convnext_tiny", 932, 1253),
    "convnextv2": ("timm", "convnextv2_large", 2840, 3467),
    "eva02": ("timm", "eva02_large_patch14_224", 6205, 6967),
    "vit": ("timm", "vit_large_patch16_224", 2817, 3362),
    "vit-small": ("timm", "vit_small_patch16_224", 1425, 1706),
    "mobilenetv3": ("timm", "mobilenetv3_large_100", 484, 1155),
    "efficientnet": ("timm", "efficientnet_b0", 996, 1766),
    "deit3": ("timm", "deit3_base_patch16_224", 1545, 1850),
    "xcit": ("timm", "xcit_tiny_12_p16_224", 2818, 3550),
    "beit": ("timm", "beit_base_patch16_224", 1835, 2187),
    "coatnet": ("timm", "coatnet_2_rw_224", 2204, 3128),
    "albert": ("text", "Albert", 2285, 2419),
    "bert": ("text", "Bert", 2078, 2386),
    "distilbert": ("text", "DistilBert", 1060, 1228),
    "electra": ("text", "Electra", 2099, 2409),
    "gpt2": ("language", "GPT2", 1889, 2179),
    "gpt-neo-125m": ("language", "GPTNeo", 2088, 2378),
    "gpt-neo-2.7b": ("language", "GPTNeo", 5488, 6238),
    "bloom-560m": ("language", "Bloom", 3667, 4167),
    "bloom-3b": ("language", "Bloom", 4567, 5187),
    "opt-350m": ("language", "OPT", 3971, 4581),
    "opt-6.7b": ("language", "OPT", 5245, 6059),
    "llama-7b": ("language", "Llama", 8330, 8722),
}

# The configurations of the published weights, where they are not the library's defaults.
CONFIGS = {
    "albert": {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    },
    "electra": {
        "embedding_size": 128, "hidden_size": 256, "intermediate_size": 1024,
        "num_attention_heads": 4,
    },
    "gpt-neo-125m": {
        "hidden_size": 768, "num_layers": 12, "num_heads": 12, "max_position_embeddings": 2048,
        "attention_types": [[["global", "local"], 6]],
    },
    "gpt-neo-2.7b": {
        "hidden_size": 2560, "num_layers": 32, "num_heads": 20, "max_position_embeddings": 2048,
        "attention_types": [[["global", "local"], 16]],
    },
    "bloom-560m": {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
    "bloom-3b": {"hidden_size": 2560, "n_layer": 30, "n_head": 32, "vocab_size": 250880},
    "opt-350m": {
        "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False,
    },
    "opt-6.7b": {
        "hidden_size": 4096, "ffn_dim": 16384, "num_hidden_layers": 32, "num_attention_heads": 32,
        "word_embed_proj_dim": 4096,
    },
}  # fmt: skip


# torchvision's wheel is built for CUDA: beside a CPU torch its operators are missing, and importing
# it (timm and transformers do) fails. None of these models calls them.
if not torch.cuda.is_available():
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for _op in ("nms", "qnms"):
        LIBRARY.define(f"{_op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def build(name: str) -> tuple[torch.nn.Module, tuple, dict]:
    kind, full_name, _, _ = MODELS[name]
    with torch.device("meta"):
        if kind == "timm":
            import timm

            model = timm.create_model(full_name)
            return model.train(), (torch.empty(512, 3, 224, 224),), {}
        import transformers

        # It looks into the tokens for padding and for packed sequences; there is neither, and on
        # the meta device nothing to look at.
        transformers.PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None
        transformers.masking_utils.find_packed_sequence_indices = lambda *_: None
        config = getattr(transformers, f"{full_name}Config")(**CONFIGS.get(name, {}))
        config.use_cache = False
        config.pad_token_id = 0
        batch, length = (128, 512) if kind == "text" else (8, 2048)
        if full_name == "GPT2":
            length = 1024
        model = getattr(transformers, f"{full_name}ForSequenceClassification")(config)
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return model.train(), (), {"input_ids": tokens}


def problem_of(name: str) -> Problem:
    model, args, kwargs = build(name)
    program = analyse(captured(Options(), model, args, kwargs)[0])
    problem = Problem(
        values=tuple(Value(value.name, value.size_bytes) for value in program.values),
        ops=tuple(
            Op(
                op.name,
                1,
                op.inputs,
                op.outputs,
                recomputable=op.recomputable,
                inplace=op.inplace,
                phase=op.phase,
                grad_of=op.grad_of,
            )
            for op in program.ops
        ),
        resident=tuple(v for v, value in enumerate(program.values) if value.resident),
        outputs=program.outputs,
        held=program.held,
        name=name,
        cost_unit="op",
    )
    check_problem(problem)
    return problem


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or MODELS:
        try:
            problem = problem_of(name)
        except Exception as error:  # one model that cannot be captured must not stop the others
            print(f"{name}: not captured: {str(error)[:300]}", flush=True)
            continue
        write_problem(folder / f"{name}.json", problem)
        _, _, nodes, values = MODELS[name]
        counts = f"{len(problem.ops)} ops, {len(problem.values)} values"
        print(f"{name}: {counts} (paper {nodes}, {values})", flush=True)


if __name__ == "__main__":
    main()
