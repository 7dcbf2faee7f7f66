"""Read config.json for families with keys and values whose experts are chosen as in DeepSeek-V3:
by sigmoids, and a bias that does not weigh them.
"""

from __future__ import annotations

from attrs import evolve

from headstock.nn.config_fields import (
    Json,
    read_bias,
    read_flag,
    read_number,
    read_positive,
    read_whole,
    without_nulls,
)
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    complete_fields,
    decoder_config,
    read_head_dim,
    read_layer_count,
)
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import read_rope
from headstock.nn.text_decoder import text_decoder
from headstock.spi import Experts, ModelConfig, QkNorm, Scoring
from headstock_deepseek.families import (
    LEAST_SUM,
    NAMES,
    check_choice,
    read_biased_experts,
    read_dense_start,
    read_sparse_layers,
)

HY_NAMES = TensorNames(
    router="mlp.router.gate",
    router_bias="mlp.expert_bias",
    router_bias_shape=(),
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
    left_out=("model.layers.{}.",),
)
MINIMAX_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    router_bias="block_sparse_moe.e_score_correction_bias",
    router_bias_shape=(),
    expert="block_sparse_moe.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
    left_out=("model.layers.{}.", "model.mtp.", "mtp."),
)

GLM4_MOE_DEFAULTS: Json = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
GLM4V_MOE_DEFAULTS: Json = {
    "vocab_size": 151424,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "max_position_embeddings": 65536,
    "attention_bias": True,
}
HY_DEFAULTS: Json = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
MINIMAX_DEFAULTS: Json = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "eos_token_id": 200020,
}
"""Published files omit fields with the defaults of these transformers classes."""

GLM4_MOE_FIELDS = (
    *("attention_bias", "use_qk_norm", "first_k_dense_replace", "n_routed_experts"),
    *("n_shared_experts", "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor"),
    *("n_group", "topk_group", "norm_topk_prob", "num_mtp_layers"),
)
HY_FIELDS = (
    *("attention_bias", "mlp_bias", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("num_shared_experts", "moe_intermediate_size", "router_scaling_factor", "mlp_layer_types"),
    # what is rounded to 16 bits before the shared expert is added
    "enable_moe_fp32_combine",
    # what transformers does not read, with the only values that it computes
    *("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias"),
    *("first_k_dense_replace", "expert_hidden_dim"),
)
MINIMAX_FIELDS = (
    *("num_local_experts", "num_experts", "num_experts_per_tok", "rotary_dim"),
    "router_jitter_noise",
    # what transformers does not read, with the only values that it computes
    *("use_qk_norm", "qk_norm_type", "use_routing_bias", "scoring_func", "attn_type_list"),
    "shared_intermediate_size",
    # layers that predict further tokens
    *("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
)


def glm4_moe_config(hf: Json) -> ModelConfig:
    """GLM-4.5 to 4.7: half of each head is turned, and the first layers are dense."""
    hf = complete_fields(without_nulls(hf, "head_dim"), GLM4_MOE_DEFAULTS)
    experts = read_biased_experts(hf)
    has_norm = read_flag(hf, "use_qk_norm", False)
    return decoder_config(
        hf,
        "Glm4MoeForCausalLM",
        model_types=("glm4_moe",),
        fields=GLM4_MOE_FIELDS,
        experts=[experts if is_sparse else None for is_sparse in read_dense_start(hf)],
        qkv_bias=read_bias(hf, "attention_bias"),
        qk_norm=QkNorm.HEAD if has_norm else QkNorm.NONE,
        ropes=[read_rope(hf, read_head_dim(hf), partial=True)],
    )


def glm4v_moe_config(hf: Json) -> ModelConfig:
    """GLM-4.5V and 4.6V: GLM-4.5 without norms of queries and keys, with defaults of its own."""
    # Which transformers does not read here.
    others = {name: value for name, value in hf.items() if name != "use_qk_norm"}
    return glm4_moe_config(complete_fields(others, GLM4V_MOE_DEFAULTS))


def hy_v3_config(hf: Json) -> ModelConfig:
    """Hy3: norms of queries and keys, experts in all layers but the first."""
    hf = complete_fields(without_nulls(hf, "head_dim"), HY_DEFAULTS)
    sparse = read_sparse_layers(hf)
    width = read_positive(hf, "moe_intermediate_size", 1536)
    for name in (
        "qk_norm",
        "route_norm",
        "moe_router_use_sigmoid",
        "moe_router_enable_expert_bias",
    ):
        check_choice(hf, name, (True,))
    check_choice(hf, "expert_hidden_dim", (width,))
    check_choice(hf, "first_k_dense_replace", (sparse.index(True) if any(sparse) else len(sparse),))
    experts = _make_experts(
        count=read_positive(hf, _find_count_field(hf), 192),
        per_token=read_positive(hf, "num_experts_per_tok", 8),
        intermediate=width,
    )
    experts = evolve(
        experts,
        norm_floor=LEAST_SUM,
        wide_scores=True,
        shared=width * read_whole(hf, "num_shared_experts", 1),
        scale=read_number(hf, "router_scaling_factor", 2.826),
    )
    bias = read_bias(hf, "attention_bias")
    return decoder_config(
        hf,
        "HYV3ForCausalLM",
        model_types=("hy_v3",),
        fields=HY_FIELDS,
        experts=[experts if is_sparse else None for is_sparse in sparse],
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read_bias(hf, "mlp_bias"),
        qk_norm=QkNorm.HEAD,
        ropes=[read_rope(hf, read_head_dim(hf), default_theta=11_158_840.0)],
    )


def minimax_m2_config(hf: Json) -> ModelConfig:
    """MiniMax-M2: norms of whole queries and keys, a part of each head turned, experts."""
    hf = _read_rotary_dim(complete_fields(hf, MINIMAX_DEFAULTS))
    check_choice(hf, "scoring_func", ("sigmoid",))
    check_choice(hf, "qk_norm_type", ("per_layer",))
    check_choice(hf, "shared_intermediate_size", (0,))
    for name in ("use_qk_norm", "use_routing_bias"):
        check_choice(hf, name, (True,))
    count = read_layer_count(hf)
    check_choice(hf, "attn_type_list", ([1] * count,))
    experts = _make_experts(
        count=read_positive(hf, _find_count_field(hf, "num_local_experts"), 256),
        per_token=read_positive(hf, "num_experts_per_tok", 8),
        intermediate=read_positive(hf, "intermediate_size"),
    )
    return decoder_config(
        hf,
        "MiniMaxM2ForCausalLM",
        model_types=("minimax_m2",),
        fields=MINIMAX_FIELDS,
        experts=[experts] * count,
        qk_norm=QkNorm.WHOLE,
        ropes=[read_rope(hf, read_head_dim(hf), default_theta=5e6, partial=True)],
    )


def _find_count_field(hf: Json, name: str = "num_experts") -> str:
    """The field that counts experts, of which transformers has two names."""
    other = "num_experts" if name == "num_local_experts" else "num_local_experts"
    return other if other in hf else name


def _make_experts(*, count: int, per_token: int, intermediate: int) -> Experts:
    """Experts by sigmoids and a bias, with weights that sum to 1.   raises: ValueError"""
    if per_token > count:
        raise ValueError(f"num_experts_per_tok: expected at most {count} experts, got {per_token}")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=intermediate,
        renormalize=True,
        choice_bias=True,
        scoring=Scoring.SIGMOID,
    )


def _read_rotary_dim(hf: Json) -> Json:
    """`hf` with the share of a head that is turned, which older files have as `rotary_dim`."""
    if hf.get("rotary_dim") is None:
        return hf
    dim, head_dim = read_positive(hf, "rotary_dim"), read_head_dim(hf)
    if dim > head_dim or dim % 2:
        raise ValueError(f"rotary_dim: expected an even number of at most {head_dim}, got {dim}")
    return {"partial_rotary_factor": dim / head_dim, **hf}


GLM4_MOE = decoder(glm4_moe_config, NAMES)
GLM4V_MOE = text_decoder(
    "Glm4vMoeForConditionalGeneration",
    {"glm4v_moe_text": glm4v_moe_config},
    NAMES,
    placeholders={"image": 151363, "video": 151364},
)
HY_V3 = decoder(hy_v3_config, HY_NAMES)
MINIMAX_M2 = decoder(minimax_m2_config, MINIMAX_NAMES)
