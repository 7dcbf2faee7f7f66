"""Read config.json."""

from __future__ import annotations

from attrs import evolve

from headstock.nn.config_fields import Json, read_bias
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import complete_fields, decoder_config
from headstock.spi import ModelConfig, QkNorm


def olmo2_config(hf: Json) -> ModelConfig:
    """OLMo-2: norms after each part instead of before, and over whole queries and keys."""
    hf = complete_fields(hf, {"num_key_value_heads": None, "rms_norm_eps": 1e-5})
    bias = read_bias(hf, "attention_bias")
    config = decoder_config(
        hf,
        "Olmo2ForCausalLM",
        model_types=("olmo2",),
        fields=("attention_bias",),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QkNorm.WHOLE,
    )
    return evolve(config, pre_norm=False, post_norm=True, wide_norms=True)


OLMO2 = decoder(olmo2_config)
