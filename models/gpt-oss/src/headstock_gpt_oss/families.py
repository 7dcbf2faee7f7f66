"""Read config.json."""

from __future__ import annotations

from attrs import evolve

from headstock.nn.config_fields import Json, read_bias, read_number, read_positive, without_nulls
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    complete_fields,
    decoder_config,
    read_head_dim,
    read_layer_count,
    read_layer_types,
    windows_by_type,
)
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import read_rope
from headstock.spi import Activation, ClampedGate, Experts, ModelConfig

NAMES = TensorNames(router="mlp.router", has_stacked_experts=True)

DEFAULTS: Json = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
}
FIELDS = (
    *("attention_bias", "sliding_window", "num_local_experts", "num_experts"),
    *("num_experts_per_tok", "swiglu_limit", "swiglu_alpha"),
    # what the authors' own code calls numbers that are stated again
    *("experts_per_token", "initial_context_length"),
)
YARN: Json = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The positions of transformers' class where config.json has none."""


def gpt_oss_config(hf: Json) -> ModelConfig:
    """GPT-OSS: a sink for each head, windows in every second layer, and experts with biases."""
    hf = without_nulls(complete_fields(hf, DEFAULTS), "head_dim")
    has_own_positions = bool(hf.get("rope_scaling")) or hf.get("rope_parameters") is not None
    if not has_own_positions:
        hf = {**hf, "rope_parameters": YARN}
    bias = read_bias(hf, "attention_bias", default=True)
    config = decoder_config(
        hf,
        "GptOssForCausalLM",
        model_types=("gpt_oss",),
        fields=FIELDS,
        windows=_read_windows(hf),
        experts=[_read_experts(hf)] * read_layer_count(hf),
        qkv_bias=bias,
        out_bias=bias,
        activation=Activation.SILU,
        sinks=True,
        ropes=[read_rope(hf, read_head_dim(hf), default_theta=150000.0)],
    )
    if not has_own_positions:
        # What the class has does not say how long the texts of this checkpoint may be.
        config = evolve(config, max_position=read_positive(hf, "max_position_embeddings"))
    return evolve(config, wide_norms=True)


def _read_windows(hf: Json) -> list[int | None]:
    """Each layer's window: in layers 0, 2, 4, ... unless `layer_types` says."""
    window = None if hf["sliding_window"] is None else read_positive(hf, "sliding_window")
    types = read_layer_types(hf) or [
        "full_attention" if index % 2 else "sliding_attention"
        for index in range(read_layer_count(hf))
    ]
    return windows_by_type(types, window)


def _read_experts(hf: Json) -> Experts:
    """The experts of every layer, weighed by a softmax over a token's own."""
    # transformers reads num_experts as another name of the same number.
    count = read_positive(hf, "num_experts" if "num_experts" in hf else "num_local_experts", 128)
    per_token = read_positive(hf, "num_experts_per_tok", 4)
    if per_token > count:
        raise ValueError(f"num_experts_per_tok: expected at most {count}, got {per_token}")
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=read_positive(hf, "intermediate_size"),
        # The softmax over some scores is that over all, divided by the sum of those.
        renormalize=True,
        score_bias=True,
        bias=True,
        gate=ClampedGate(
            limit=read_number(hf, "swiglu_limit", 7.0),
            slope=read_number(hf, "swiglu_alpha", 1.702),
        ),
    )


GPT_OSS = decoder(gpt_oss_config, NAMES)
