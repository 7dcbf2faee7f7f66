"""Read config.json."""

from __future__ import annotations

from headstock.nn.config_fields import (
    Json,
    quoted,
    read_bias,
    read_flag,
    read_number,
    read_positive,
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
from headstock.spi import Activation, ModelConfig, QkNorm, ShortConv

NAMES = TensorNames(
    out="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    attn_norm="operator_norm",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    final_norm="model.embedding_norm",
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


def lfm2_config(hf: Json) -> ModelConfig:
    """LFM2: gated convolutions, and attention with a norm of each query and key."""
    hf = {**DEFAULTS, **without_nulls(hf, "hidden_act")}
    _check_unread_fields(hf)
    types, hidden = _read_types(hf), read_positive(hf, "hidden_size")
    taps = read_positive(hf, "conv_L_cache")
    if not 2 <= taps <= MOST_TAPS:
        raise ValueError(f"conv_L_cache is {taps}, expected 2 to {MOST_TAPS}")
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
        "Lfm2ForCausalLM",
        model_types=("lfm2",),
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
                f"full_attn_idxs is {quoted(listed)}, expected a list of layers out of 0 to "
                f"{count - 1}"
            )
        types = ["full_attention" if index in listed else "conv" for index in range(count)]
    if "full_attention" not in types:
        raise ValueError(
            "no layer is of type 'full_attention' by layer_types or full_attn_idxs; expected "
            "one at "
            "least"
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
        raise ValueError(f"{name} is {stated}, which gives a width of 0; expected more")
    multiple = read_positive(hf, "block_multiple_of")
    return multiple * -(-width // multiple)


def _check_unread_fields(hf: Json) -> None:
    """Raise ValueError if unused fields contradict the model."""
    for name, other in SAME_AS.items():
        if hf.get(name) is not None and other in hf and hf[name] != hf[other]:
            raise ValueError(
                f"{name} is {quoted(hf[name])}, but {other} is {quoted(hf[other])}; expected "
                "the same"
            )
    for name in ALWAYS_TRUE:
        if hf.get(name) not in (None, True):
            raise ValueError(f"{name} is {quoted(hf[name])}, which is not supported; expected true")
    if read_activation(hf) is not Activation.SILU:
        raise ValueError(f"hidden_act is {quoted(hf['hidden_act'])}, but LFM2 only has 'silu'")


LFM2 = decoder(lfm2_config, NAMES)
