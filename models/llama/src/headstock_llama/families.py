"""How config.json is read for each family."""

from __future__ import annotations

from headstock.nn.config import Json, decoder_config, flag, layer_count, positive
from headstock.nn.decoder import decoder
from headstock.spi import ModelConfig


def llama(hf: Json) -> ModelConfig:
    """Llama: biases as configured."""
    bias = flag(hf, "attention_bias", False)
    return decoder_config(hf, "LlamaForCausalLM", qkv_bias=bias, out_bias=bias, mlp_bias=flag(hf, "mlp_bias", False))


def mistral(hf: Json) -> ModelConfig:
    """Mistral: one window for all layers, 4096 where the field is absent and none where it is null."""
    window = None if hf.get("sliding_window", 4096) is None else positive(hf, "sliding_window", 4096)
    return decoder_config(hf, "MistralForCausalLM", windows=[window] * layer_count(hf))


LLAMA = decoder(llama)
MISTRAL = decoder(mistral)
