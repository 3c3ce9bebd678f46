"""The mixture-of-experts models of transformers: their products have as many rows as tokens chose
an expert, so no op of theirs can be tried on invented indices (finding A3)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same, train
from support.zoo import BATCH, LENGTH, VOCABULARY, Example, Inputs, require, tokens
from torch import Tensor

import rekindle

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "use_cache": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "GptOss": {
        "intermediate_size": 64,
        "head_dim": 16,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "DeepseekV3": {
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
}


def example(kind: str, dtype: torch.dtype) -> Example:
    transformers = require("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | KINDS[kind]))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).train()

    def inputs(step: int) -> Inputs:
        ids = tokens(step, torch.device("cpu"), VOCABULARY, BATCH, LENGTH)
        return (), {"input_ids": ids}

    def loss(output: Any) -> Tensor:
        targets = torch.arange(BATCH * LENGTH) % VOCABULARY
        return F.cross_entropy(output.logits.flatten(0, 1).float(), targets)

    return Example(model, inputs, loss)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.8, "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a3_mixed_experts_train_as_in_eager(kind: str, dtype: torch.dtype, budget: Any) -> None:
    expected = train(example(kind, dtype))
    ours = example(kind, dtype)
    _, kwargs = ours.inputs(0)
    managed = rekindle.rematerialize(
        ours.model, kwargs=kwargs, budget=budget, time_limit_s=2, on_miss="raise"
    )
    assert not managed.plan.profile.not_measured
    assert_same(expected, train(ours, managed))
