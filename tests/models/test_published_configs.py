"""Files as their authors published them: what changes nothing is not warned of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from families import Case

from headstock_conformance.model.parity import shape
from headstock_llama.families import LLAMA

COMMON: Mapping[str, Any] = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "transformers_version": "4.54.0",
    "use_cache": True,
}
PUBLISHED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Gemma-2": (
        "gemma2",
        {
            "cache_implementation": "hybrid",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
        },
    ),
    "Gemma-3 1B": (
        "gemma3_text",
        {
            "cache_implementation": "hybrid",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_scaling": None,
            "rope_local_base_freq": 10000,
            "rope_theta": 1000000,
            "sliding_window": 8,
            "sliding_window_pattern": 6,
        },
    ),
    "Gemma-4 26B-A4B": (
        "gemma4_text",
        {
            "attention_bias": False,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "moe_intermediate_size": 20,
            "num_experts": 8,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 8,
            "top_k_experts": 2,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": False,
            "vocab_size_per_layer_input": 262144,
        },
    ),
    "Phi-4-mini": (
        "phi3",
        {
            "attention_bias": False,
            "embd_pdrop": 0.0,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0,
            "sliding_window": None,
        },
    ),
    "Mixtral": (
        "mixtral",
        {
            "num_experts_per_tok": 2,
            "num_local_experts": 5,
            "output_router_logits": False,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
        },
    ),
    "Granite 3": ("granite", {"attention_bias": False, "mlp_bias": False, "rope_scaling": None}),
    "SmolLM3": (
        "smollm3",
        {
            "attention_bias": False,
            "layer_types": ["full_attention"] * 3,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 0],
            "pretraining_tp": 2,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
    "OLMo-2": ("olmo2", {"attention_bias": False, "rope_scaling": None, "rope_theta": 500000}),
    "Ernie-4.5": ("ernie4_5", {"use_bias": False, "head_dim": 16, "rope_theta": 500000}),
    "Ernie-4.5, experts": (
        "ernie4_5_moe",
        {
            "compression_ratio": 1.0,
            "is_quantized": False,
            "moe_capacity": [64, 64, 64],
            "moe_gate": "topk",
            "moe_layer_interval": 1,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 2,
            "moe_use_aux_free": True,
            "num_nextn_predict_layers": 1,
            "rope_scaling": None,
            "rope_theta": 500000,
            "use_bias": False,
            "use_rmsnorm": True,
        },
    ),
    "GPT-OSS 20B": (
        "gpt_oss",
        {
            "attention_bias": True,
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_experts_per_tok": 4,
            "output_router_logits": False,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "router_aux_loss_coef": 0.9,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
    ),
    "Seed-OSS": (
        "seed_oss",
        {
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
            "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"},
        },
    ),
    "Qwen1.5-MoE": (
        "qwen2_moe",
        {
            "decoder_sparse_step": 1,
            "max_window_layers": 21,
            "norm_topk_prob": False,
            "output_router_logits": False,
            "qkv_bias": True,
            "router_aux_loss_coef": 0.001,
            "sliding_window": 32768,
            "use_sliding_window": False,
        },
    ),
    "Qwen3-Next": (
        "qwen3_next",
        {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "full_attention_interval": 4,
            "layer_types": None,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "output_router_logits": False,
            "partial_rotary_factor": 0.25,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "router_aux_loss_coef": 0.001,
            "use_sliding_window": False,
        },
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {
            "aux_loss_alpha": 0.001,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "pretraining_tp": 1,
            "q_lora_rank": None,
            "scoring_func": "softmax",
            "seq_aux": True,
            "topk_method": "greedy",
        },
    ),
}
"""The fields of published files beside sizes."""

LLAMA_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "SmolLM2": {
        "is_llama_config": True,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4", "use_external_data_format": {"model.onnx": True}},
    },
    "Falcon3": {"activation": "swiglu", "head_dim": 16, "mlp_bias": False},
    "Vicuna": {"max_sequence_length": 4096, "pretraining_tp": 1},
}
"""The same of models that are Llama under another name."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_leaves_nothing_unread(name: str) -> None:
    model_type, changes = PUBLISHED[name]
    case = Case(model_type, {**COMMON, **changes})

    assert case.family.config(case.hf).ignored_fields == ()


@pytest.mark.parametrize("name", LLAMA_FIELDS)
def test_a_published_file_of_another_llama_leaves_nothing_unread(name: str) -> None:
    assert LLAMA.config({**shape("llama"), **COMMON, **LLAMA_FIELDS[name]}).ignored_fields == ()


@pytest.mark.parametrize(
    ("model_type", "changes", "ignored"),
    [
        # Experts that may be full drop tokens: the field counts for something.
        ("ernie4_5_moe", {"moe_capacity": [64, 5, 5]}, ("moe_capacity",)),
        ("ernie4_5_moe", {"moe_capacity": 2.0}, ("moe_capacity",)),
        # transformers reads these of Qwen3-MoE and of Qwen3.5 alone.
        ("qwen3_next", {"num_local_experts": 3}, ("num_local_experts",)),
        ("qwen3_next", {"attn_output_gate": False}, ("attn_output_gate",)),
        ("qwen3_next", {"mamba_ssm_dtype": "bfloat16"}, ("mamba_ssm_dtype",)),
        (
            "smollm3",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            ("max_window_layers",),
        ),
    ],
    ids=str,
)
def test_what_may_change_a_result_is_still_named(
    model_type: str, changes: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    case = Case(model_type, changes)

    assert case.family.config(case.hf).ignored_fields == ignored


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("phi3", {"full_attn_mod": 2}),
        ("phi3", {"interpolate_factor": 4}),
        ("ernie4_5_moe", {"moe_gate": "top2_fused"}),
        ("ernie4_5_moe", {"compression_ratio": 0.5}),
        ("ernie4_5", {"use_rmsnorm": False}),
    ],
    ids=str,
)
def test_what_changes_the_result_and_is_not_served_is_refused(
    model_type: str, changes: dict[str, Any]
) -> None:
    ((name, _),) = changes.items()
    case = Case(model_type, changes)

    with pytest.raises(ValueError, match=f"^{name}: expected .* got .* not supported$"):
        case.family.config(case.hf)
