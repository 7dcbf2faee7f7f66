"""Small configurations of transformers' causal decoders, with settings that are not neutral."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_WINDOW = {"sliding_window": 6}
_LATENT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "kv_lora_rank": 12,
    "q_lora_rank": 12,
}
_ALPHA = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 8.0, "factor": 1.0}
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_PLAIN = (
    "arcee phi nemotron olmo olmo2 cohere glm glm4 gemma hunyuan_v1_dense ministral3 smollm3 "
    "granite seed_oss cwm solar_open minimax_m2 mixtral qwen3 qwen3_moe olmoe flex_olmo "
    "ernie4_5_moe glm4_moe hy_v3 exaone_moe granitemoe granitemoeshared bitnet jais2 nanochat "
    "kolibri1 hyperclovax gpt_bigcode persimmon"
).split()

BEHIND_PADDING = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "data2vec-text",
    "roberta-prelayernorm",
)
"""Types whose positions begin behind the token of padding, which no prompt of the tests has."""

SERVED: Mapping[str, Mapping[str, Any]] = {
    # A window by the call, a cap, learned positions, a window in masks alone beside experts that
    # checkpoints have one by one, values narrower than keys, norms and heads of another kind.
    "gemma2": {**_WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gpt2": {},
    "phimoe": _WINDOW,
    "minicpm3": _LATENT,
    "cohere2": _WINDOW,
    "gpt_oss": _WINDOW,
    "granite_swa": _WINDOW,
    "helium": {},
    "gpt_neox": {},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    **dict.fromkeys(_PLAIN, _NOTHING),
    **dict.fromkeys(("starcoder2", "olmo3", "gemma3_text", "vaultgemma", "afmoe"), _WINDOW),
    **dict.fromkeys(("mellum", "laguna", "cohere2_moe"), _WINDOW),
    **dict.fromkeys(("youtu", "axk1", "glm4_moe_lite", "deepseek_v3", "deepseek_v2"), _LATENT),
    # Positions from behind the padding; "dynamic" ropes that never change.
    **{name: {"is_decoder": True, "pad_token_id": 5} for name in BEHIND_PADDING},
    "bert": {"is_decoder": True},
    "ctrl": {},
    "dots1": {"n_shared_experts": 1},
    "modernbert-decoder": {"local_attention": 12, "global_attn_every_n_layers": 2},
    "hunyuan_v1_moe": {"rope_parameters": _ALPHA, "moe_topk": 2},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "mamba_n_heads": 4, "mamba_d_head": 16},
    "exaone4": {**_WINDOW, "sliding_window_pattern": 2},
    "qwen2_moe": {
        **_WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "shared_expert_intermediate_size": 16,
    },
}
"""model_type -> settings beside `_BASE` and `_EXPERTS`; those that are tested by default first."""

REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "mimo_v2_flash": (_WINDOW, r"layer 0: values are wider than keys"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 2}, r"keep a state"),
    "diffllama": ({}, r"calls attention twice in layer 0"),
    "llama4_text": ({"attention_chunk_size": 6}, r"attends in chunks"),
    "phi3": ({"rope_parameters": _LONG_ROPE}, r"rope_type 'longrope'"),
    "gemma4_text": (
        {
            **_WINDOW,
            "vocab_size_per_layer_input": 96,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 16,
        },
        r"layer 3: heads or widths differ",
    ),
    "doge": ({}, r"computes with its mask"),
    "opt": ({}, r"head that reaches into the decoder"),
    "bloom": ({}, r"does not call transformers' attention interface"),
    "stablelm": ({}, r"does not call transformers' attention interface"),
    "qwen3_next": ({}, r"does not call transformers' attention interface"),
    "hrm_text": ({}, r"calls attention twice"),
    "jetmoe": ({}, r"reads numbers on the host in JetMoeTopKGating"),
    "dbrx": ({}, r"cannot be built: transformers fails with Attr"),
    "minimax": ({}, r"calls attention in 2 of 4 layers; the others keep a state"),
    "lfm3": ({"layer_types": ["conv", "full_attention"] * 2}, r"keep a state"),
    **dict.fromkeys(
        ("falcon", "gptj", "mpt", "mamba", "bart"),
        ({}, r"does not call transformers' attention interface"),
    ),
    "deepseek_v32": (_LATENT, r"computes with its mask"),
}
"""model_type -> settings, and what the refusal says."""


def make_config(model_type: str, settings: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """config.json of a small decoder."""
    plain = AutoConfig.for_model(model_type)
    has_experts = any(hasattr(plain, name) for name in _EXPERTS if name.endswith("experts"))
    names = plain.to_dict().keys() | plain.attribute_map.keys()
    known = {name: value for name, value in _BASE.items() if name in names}
    fields = known | (_EXPERTS if has_experts else {}) | dict(settings) | changes
    # Files have the names that a family was published with, such as n_embd.
    fields = {plain.attribute_map.get(name, name): value for name, value in fields.items()}
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return {**fields, "model_type": model_type, "architectures": [architecture]}
