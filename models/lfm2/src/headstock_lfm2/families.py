"""Read config.json for each family."""

from __future__ import annotations

from collections.abc import Sequence

from headstock.nn.config_fields import (
    Json,
    quoted,
    read_bias,
    read_flag,
    read_number,
    read_positive,
    read_whole,
    without_nulls,
)
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    decoder_config,
    read_activation,
    read_head_dim,
    read_layer_count,
    read_layer_types,
)
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import read_rope
from headstock.spi import Activation, Experts, ModelConfig, QkNorm, Scoring, ShortConv

NAMES = TensorNames(
    out="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attn_norm="operator_norm",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    final_norm="model.embedding_norm",
    router="feed_forward.gate",
    router_bias="feed_forward.expert_bias",
    router_bias_shape=(),
    expert="feed_forward.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
    whole_gate_up="feed_forward.experts.gate_up_proj",
    whole_down="feed_forward.experts.down_proj",
)

DEFAULTS: Json = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
"""Published files omit fields with the defaults of this transformers class."""

MOE_DEFAULTS: Json = {
    **{name: value for name, value in DEFAULTS.items() if not name.startswith("block_")},
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "block_auto_adjust_ff_dim": False,
}
"""The same of the class with experts, which never adjusts widths."""

LEAST_SUM = 1e-6
"""transformers adds it to the sum that weights are divided by. As a lower bound it gives the same
within 1e-5 for all sums above 0.1, and sums of sigmoids of the best experts are.
"""

MOST_TAPS = 1024
"""More than any real model has, and few enough for sequential addition."""

SAME_AS = {
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "block_norm_eps": "norm_eps",
    "rms_norm_eps": "norm_eps",
    "theta": "rope_theta",
}
"""Unused fields of published files -> the fields with the same meaning."""

ALWAYS_TRUE = ("block_use_swiglu", "use_pos_enc")
"""Other unused fields of published files; false would mean another model."""

FIELDS = (
    *("norm_eps", "conv_bias", "conv_L_cache", "full_attn_idxs"),
    *("block_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier", "block_auto_adjust_ff_dim"),
    *("tie_embedding", *SAME_AS, *ALWAYS_TRUE),
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
    "conv_use_xavier_init",
)


MOE_FIELDS = (
    *("moe_intermediate_size", "num_dense_layers", "num_experts", "num_experts_per_tok"),
    *("use_expert_bias", "norm_topk_prob", "routed_scaling_factor"),
)


def lfm2_config(hf: Json) -> ModelConfig:
    """LFM2: gated convolutions, and attention with a norm of each query and key."""
    hf = {**DEFAULTS, **without_nulls(hf, "hidden_act")}
    return _read_lfm2(hf, "Lfm2ForCausalLM", "lfm2")


def lfm2_moe_config(hf: Json) -> ModelConfig:
    """LFM2 with experts in all but the first layers."""
    hf = {**MOE_DEFAULTS, **without_nulls(hf, "hidden_act")}
    if hf.get("layer_types") is None:
        # transformers reads no `full_attn_idxs` here, and fails.
        raise ValueError("layer_types: expected an entry for each layer, got null")
    experts = _read_experts(hf)
    dense = read_whole(hf, "num_dense_layers")
    return _read_lfm2(
        {name: value for name, value in hf.items() if name not in MOE_FIELDS},
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        [experts if index >= dense else None for index in range(read_layer_count(hf))],
    )


def _read_experts(hf: Json) -> Experts:
    """Experts by sigmoids, and by a bias where the file says so.   raises: ValueError"""
    count, per_token = read_positive(hf, "num_experts"), read_positive(hf, "num_experts_per_tok")
    if per_token > count:
        raise ValueError(f"num_experts_per_tok: expected at most {count} experts, got {per_token}")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=read_positive(hf, "moe_intermediate_size"),
        renormalize=read_flag(hf, "norm_topk_prob", True),
        norm_floor=LEAST_SUM,
        choice_bias=read_flag(hf, "use_expert_bias", True),
        scoring=Scoring.SIGMOID,
        scale=read_number(hf, "routed_scaling_factor"),
    )


def _read_lfm2(
    hf: Json,
    architecture: str,
    model_type: str,
    experts: Sequence[Experts | None] | None = None,
) -> ModelConfig:
    """Either family, with these experts."""
    _check_unread_fields(hf)
    types, hidden = _read_types(hf), read_positive(hf, "hidden_size")
    taps = read_positive(hf, "conv_L_cache")
    if not 2 <= taps <= MOST_TAPS:
        raise ValueError(f"conv_L_cache: expected 2 to {MOST_TAPS}, got {taps}")
    conv = ShortConv(taps=taps, width=hidden, bias=read_bias(hf, "conv_bias"))
    plain = {
        **{name: value for name, value in hf.items() if name not in ("layer_types", *FIELDS)},
        "intermediate_size": _read_intermediate(hf),
        "rms_norm_eps": read_number(hf, "norm_eps"),
        "tie_word_embeddings": read_flag(
            hf, "tie_embedding", read_flag(hf, "tie_word_embeddings", True)
        ),
    }
    return decoder_config(
        plain,
        architecture,
        model_types=(model_type,),
        experts=experts,
        windows=[None] * len(types),
        convs=[conv if name == "conv" else None for name in types],
        qk_norm=QkNorm.HEAD,
        ropes=[read_rope(hf, read_head_dim(hf), default_theta=1e6)],
    )


def _read_types(hf: Json) -> list[str]:
    """Each layer's type: from `layer_types`, else from the layers in `full_attn_idxs`.

    raises: ValueError
    """
    count, listed = read_layer_count(hf), hf.get("full_attn_idxs")
    types = read_layer_types(hf, ("full_attention", "conv"))
    if types is None:
        if listed is None:
            listed = list(range(count))
        if not isinstance(listed, list) or not all(
            type(each) is int and 0 <= each < count for each in listed
        ):
            raise ValueError(
                f"full_attn_idxs: expected a list of layers from 0 to {count - 1}, got "
                f"{quoted(listed)}"
            )
        types = ["full_attention" if index in listed else "conv" for index in range(count)]
    if "full_attention" not in types:
        raise ValueError(
            "layer_types or full_attn_idxs: expected at least one 'full_attention' layer, got none"
        )
    return types


def _read_intermediate(hf: Json) -> int:
    """The width of a feed-forward part, which differs from the stated one.

    Two thirds of it, so that the gated part has equally many parameters, times a factor, rounded
    up.
    raises: ValueError
    """
    name = "block_ff_dim" if "block_ff_dim" in hf else "intermediate_size"
    stated = read_positive(hf, name)
    if not read_flag(hf, "block_auto_adjust_ff_dim", True):
        return stated
    width = int(read_number(hf, "block_ffn_dim_multiplier") * int(2 * stated / 3))
    if width < 1:
        raise ValueError(f"{name}: expected a width of at least 1, got {stated}, which gives 0")
    multiple = read_positive(hf, "block_multiple_of")
    return multiple * -(-width // multiple)


def _check_unread_fields(hf: Json) -> None:
    """Raise ValueError if unused fields contradict the model."""
    for name, other in SAME_AS.items():
        if hf.get(name) is not None and other in hf and hf[name] != hf[other]:
            raise ValueError(
                f"{name}: expected {quoted(hf[other])}, the same as {other}, got {quoted(hf[name])}"
            )
    for name in ALWAYS_TRUE:
        if hf.get(name) not in (None, True):
            raise ValueError(
                f"{name}: expected true, got {quoted(hf[name])}, which is not supported"
            )
    if read_activation(hf) is not Activation.SILU:
        raise ValueError(f"hidden_act: expected silu, got {quoted(hf['hidden_act'])}")


LFM2 = decoder(lfm2_config, NAMES)
LFM2_MOE = decoder(lfm2_moe_config, NAMES)
