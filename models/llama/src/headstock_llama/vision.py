"""Read config.json for families that take images too, and of which the text is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from headstock.nn.config_fields import Json
from headstock.nn.decoder_config import complete_fields
from headstock.nn.text_decoder import TOWERS, text_decoder
from headstock.spi import Model, ModelConfig
from headstock_llama.families import (
    llama_config,
    ministral3_config,
    ministral_config,
    mistral_config,
)

LLAMA_DEFAULTS: Json = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
MISTRAL_DEFAULTS: Json = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}
"""Files may omit fields with the defaults of these transformers classes."""


def nested_llama_config(hf: Json) -> ModelConfig:
    """Llama in the table of a text decoder."""
    return llama_config(complete_fields(hf, LLAMA_DEFAULTS))


def nested_mistral_config(hf: Json) -> ModelConfig:
    """Mistral in the table of a text decoder."""
    return mistral_config(complete_fields(hf, MISTRAL_DEFAULTS))


LLAVA_READERS: Mapping[str, Callable[[Json], ModelConfig]] = MappingProxyType(
    {"llama": nested_llama_config, "mistral": nested_mistral_config}
)
# Idefics3 and SmolVLM have other names for the parts.
IDEFICS_RENAMES = (("model.text_model.", "model."), ("text_model.", "model."))
IDEFICS_TOWERS = tuple(
    (f"{base}{name}.", "vision tower")
    for base in ("model.", "")
    for name in ("vision_model", "connector")
)
# A vector that stands for the end of a row of an image.
NEWLINE = tuple((f"{base}image_newline", "vision tower") for base in ("", "model."))

MISTRAL3 = text_decoder(
    "Mistral3ForConditionalGeneration",
    {
        "mistral": mistral_config,
        "ministral": ministral_config,
        "ministral3": ministral3_config,
    },
    placeholders={"image": 10},
    tied=True,
)
LLAVA = text_decoder("LlavaForConditionalGeneration", LLAVA_READERS, placeholders={"image": 32000})
LLAVA_NEXT = text_decoder(
    "LlavaNextForConditionalGeneration",
    LLAVA_READERS,
    placeholders={"image": 32000},
    towers=(*TOWERS, *NEWLINE),
)


def _make_idefics(architecture: str) -> Model:
    """Idefics3, or SmolVLM, which has its decoder."""
    return text_decoder(
        architecture,
        {"llama": nested_llama_config},
        placeholders={"image": 128257},
        towers=IDEFICS_TOWERS,
        renames=IDEFICS_RENAMES,
    )


IDEFICS3 = _make_idefics("Idefics3ForConditionalGeneration")
SMOLVLM = _make_idefics("SmolVLMForConditionalGeneration")
