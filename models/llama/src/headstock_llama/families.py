"""Read config.json for each family."""

from __future__ import annotations

from math import isfinite

from attrs import evolve

from headstock.nn.config_fields import Json, quoted, read_bias, read_positive, without_nulls
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    check_whole_heads,
    complete_fields,
    decoder_config,
    read_head_dim,
    read_layer_count,
    read_layer_types,
    uniform_windows,
    windows_by_type,
)
from headstock.nn.rope_config import ORIGINAL, read_rope
from headstock.spi import ModelConfig, QueryScale

MINISTRAL3_DEFAULTS: Json = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "eos_token_id": 2,
}
MINISTRAL3_ROPE: Json = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Published files omit fields with the defaults of this transformers class."""


def llama_config(hf: Json) -> ModelConfig:
    """Llama: biases as configured, and no windows."""
    hf = without_nulls(hf, "head_dim", "num_key_value_heads")
    bias = read_bias(hf, "attention_bias")
    check_whole_heads(hf)
    return decoder_config(
        hf,
        "LlamaForCausalLM",
        model_types=("llama",),
        fields=("attention_bias", "mlp_bias"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read_bias(hf, "mlp_bias"),
    )


def mistral_config(hf: Json) -> ModelConfig:
    """Mistral: one window for all layers, 4096 if the field is absent and none if it is null.

    A configuration with `layer_types`, even if the field is null, is Ministral, as in
    transformers.
    """
    hf = without_nulls(hf, "head_dim")
    return _read_mistral(hf, "MistralForCausalLM", by_layer=hf.get("model_type") == "ministral")


def ministral_config(hf: Json) -> ModelConfig:
    """Ministral as saved by transformers 5: like `mistral_config` except for `model_type`."""
    return _read_mistral(
        without_nulls(hf, "head_dim"),
        "MinistralForCausalLM",
        by_layer=hf.get("model_type") != "mistral",
    )


def _read_mistral(hf: Json, architecture: str, *, by_layer: bool) -> ModelConfig:
    """Mistral under either name.

    by_layer: whether windows are per layer even without `layer_types`
    """
    if by_layer or "layer_types" in hf:
        windows = _ministral_windows(hf)
    else:
        window = (
            None
            if hf.get("sliding_window", 4096) is None
            else read_positive(hf, "sliding_window", 4096)
        )
        windows = [window] * read_layer_count(hf)
    return decoder_config(
        hf,
        architecture,
        model_types=("mistral", "ministral"),
        fields=("sliding_window",),
        windows=windows,
        default_kv_heads=8,
    )


def _ministral_windows(hf: Json) -> list[int | None]:
    """Each layer's window. A window and `head_dim` are required even if no layer has a window."""
    read_positive(hf, "head_dim")
    window, types = read_positive(hf, "sliding_window", 4096), read_layer_types(hf)
    return [window] * read_layer_count(hf) if types is None else windows_by_type(types, window)


def ministral3_config(hf: Json) -> ModelConfig:
    """Ministral 3: queries grow with their positions, from the original length of YaRN on."""
    hf = complete_fields(without_nulls(hf, "head_dim"), MINISTRAL3_DEFAULTS)
    title = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    table = MINISTRAL3_ROPE if hf.get(title) is None else hf[title]
    if not isinstance(table, dict) or "llama_4_scaling_beta" not in table:
        # transformers fails without it.
        raise ValueError(
            f"{title}: expected a table with llama_4_scaling_beta, got {quoted(table)}"
        )
    beta = table["llama_4_scaling_beta"]
    if type(beta) not in (int, float) or not isfinite(beta):
        raise ValueError(f"{title}.llama_4_scaling_beta: expected a number, got {quoted(beta)}")
    others = ("llama_4_scaling_beta", "max_position_embeddings")
    hf = {**hf, title: {name: table[name] for name in table if name not in others}}
    rope = read_rope(hf, read_head_dim(hf))
    original = rope.parameters.get(ORIGINAL)
    if beta and original is None:
        raise ValueError(
            f"{title}.{ORIGINAL}: expected a number with llama_4_scaling_beta, got null"
        )
    window = None if hf.get("sliding_window") is None else read_positive(hf, "sliding_window")
    config = decoder_config(
        hf,
        "Ministral3ForCausalLM",
        model_types=("ministral3",),
        fields=("sliding_window",),
        windows=uniform_windows(hf, window),
        ropes=[rope],
    )
    # As stated, though YaRN might stretch to more: of published files, both are the same.
    stated = read_positive(hf, "max_position_embeddings")
    scale = None if not beta or original is None else QueryScale(rate=beta, length=original)
    return evolve(config, max_position=stated, query_scale=scale)


LLAMA = decoder(llama_config)
MISTRAL = decoder(mistral_config)
MINISTRAL = decoder(ministral_config)
MINISTRAL3 = decoder(ministral3_config)
