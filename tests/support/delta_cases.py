"""Configurations of families with gated delta rules, each with settings that are not neutral."""

from __future__ import annotations

from families import NEW, OLD, Case

# transformers computes prompts in chunks, whose rounding smaller norms would enlarge.
DELTA_CASES = (
    Case("qwen3_5_text", {"head_dim": 64, "rms_norm_eps": 0.01, **NEW}),
    Case(
        "qwen3_5_text",
        {
            "full_attention_interval": 2,
            "layer_types": None,
            "linear_conv_kernel_dim": 2,
            "linear_num_key_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_theta": 300.0,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 0.01,
        },
    ),
    Case(
        "qwen3_5_moe_text",
        {"num_experts_per_tok": 3, "linear_value_head_dim": 4, "rms_norm_eps": 0.01, **NEW},
    ),
    Case(
        "qwen3_5_moe_text",
        {
            "linear_num_value_heads": 2,
            "head_dim": 64,
            "rms_norm_eps": 0.01,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **OLD,
        },
    ),
    Case(
        "qwen3_next",
        {
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
            "head_dim": 64,
            "linear_num_value_heads": 6,
            "rms_norm_eps": 0.01,
            **NEW,
        },
    ),
    Case(
        "qwen3_next",
        {
            "full_attention_interval": 2,
            "layer_types": None,
            "decoder_sparse_step": 2,
            "num_experts_per_tok": 3,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 4,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 0.01,
            **OLD,
        },
    ),
    Case(
        "qwen3_next",
        {"linear_num_value_heads": 2, "mlp_only_layers": None, "rms_norm_eps": 0.1},
    ),
)
