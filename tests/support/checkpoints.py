"""Small random checkpoints, written by transformers: every shape that the loader must read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from attrs import field, frozen
from transformers import PreTrainedModel

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@frozen
class Variant:
    """A family with changes to its configuration, and how it is saved."""

    name: str
    family: str
    changes: dict[str, Any] = field(factory=dict)
    saving: dict[str, Any] = field(factory=dict)


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 6}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}

VARIANTS = (
    Variant("llama", "Llama"),
    Variant(
        "llama-tied-sharded", "Llama", {"tie_word_embeddings": True}, {"max_shard_size": "20KB"}
    ),
    Variant("llama-biases", "Llama", {"attention_bias": True, "mlp_bias": True}),
    Variant("llama-llama3", "Llama", {"rope_parameters": LLAMA3}),
    Variant("llama-linear", "Llama", {"rope_parameters": LINEAR}),
    Variant("llama-yarn", "Llama", {"rope_parameters": YARN}),
    Variant("mistral", "Mistral", {"sliding_window": None}),
    Variant("mistral-window", "Mistral", {"sliding_window": 5}),
    Variant("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    Variant("qwen2-two-groups", "Qwen2", {**WINDOW, "max_window_layers": 1}),
    Variant("qwen3", "Qwen3", {"tie_word_embeddings": True}),
    Variant("qwen3-sharded-biases", "Qwen3", {"attention_bias": True}, {"max_shard_size": "30KB"}),
    Variant(
        "qwen3-yarn-mscale",
        "Qwen3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    Variant(
        "qwen3-layer-types",
        "Qwen3",
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    Variant("qwen3-moe", "Qwen3Moe", {**MOE, "norm_topk_prob": True}),
    Variant(
        "qwen3-moe-stacked",
        "Qwen3Moe",
        {**MOE, "mlp_only_layers": [1]},
        {"save_original_format": False},
    ),
    Variant("qwen3-moe-sparse-window", "Qwen3Moe", {**MOE, **WINDOW, "decoder_sparse_step": 2}),
)


def build_model(variant: Variant) -> PreTrainedModel:
    """Build the model in float32; weights, norms and biases are all random."""
    config = getattr(transformers, f"{variant.family}Config")(**{**SHAPE, **variant.changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model: PreTrainedModel = (
        getattr(transformers, f"{variant.family}ForCausalLM")(config).eval().float()
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_model(variant: Variant, directory: Path) -> PreTrainedModel:
    """Build the model and save it in `directory`."""
    model = build_model(variant)
    model.save_pretrained(directory, **variant.saving)
    return model
