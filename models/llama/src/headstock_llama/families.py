"""Read config.json for each family."""

from __future__ import annotations

from headstock.nn.config_fields import Json, read_bias, read_positive, without_nulls
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    check_whole_heads,
    decoder_config,
    read_layer_count,
    read_layer_types,
    windows_by_type,
)
from headstock.spi import ModelConfig


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


LLAMA = decoder(llama_config)
MISTRAL = decoder(mistral_config)
MINISTRAL = decoder(ministral_config)
