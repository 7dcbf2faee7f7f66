"""Read config.json for families that take images too, and of which the text is served.

Their tokens have a position for each section of a head, which are equal for text: so the decoder is
that of Qwen2 or Qwen3.
"""

from __future__ import annotations

from headstock.nn.config_fields import Json, without_nulls
from headstock.nn.decoder_config import check_whole_heads, complete_fields
from headstock.nn.parameters import TensorNames
from headstock.nn.text_decoder import TOWERS, text_decoder
from headstock.spi import ModelConfig
from headstock_qwen.families import WINDOW_FIELDS, qwen2_config, qwen3_config, qwen3_moe_config

PLACEHOLDERS = {"image": 151655, "video": 151656}

QWEN2_VL_DEFAULTS: Json = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "eos_token_id": 151645,
}
QWEN3_VL_DEFAULTS: Json = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 128000,
}
QWEN3_VL_MOE_DEFAULTS: Json = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128000,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
}
QWEN_DEFAULTS: Json = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
}
"""Files may omit fields with the defaults of these transformers classes."""


def nested_qwen2_config(hf: Json) -> ModelConfig:
    """Qwen2 in the table of a text decoder."""
    return qwen2_config(complete_fields(hf, QWEN_DEFAULTS))


def nested_qwen3_config(hf: Json) -> ModelConfig:
    """Qwen3 in the table of a text decoder."""
    return qwen3_config(complete_fields(hf, {**QWEN_DEFAULTS, "head_dim": 128}))


def qwen2_vl_config(hf: Json) -> ModelConfig:
    """Qwen2-VL and Qwen2.5-VL: Qwen2 with defaults of its own."""
    check_whole_heads({**QWEN2_VL_DEFAULTS, **hf})
    return qwen2_config(_complete(hf, QWEN2_VL_DEFAULTS, 1e6))


def qwen3_vl_config(hf: Json) -> ModelConfig:
    """Qwen3-VL: Qwen3 without windows."""
    return qwen3_config(_complete(_drop_windows(hf), QWEN3_VL_DEFAULTS, 5e5))


def qwen3_vl_moe_config(hf: Json) -> ModelConfig:
    """Qwen3-VL with experts: Qwen3-MoE without windows, and always with weights that sum to 1."""
    hf = without_nulls(_drop_windows(hf), "head_dim", "mlp_only_layers")
    # transformers 5 writes num_local_experts where earlier releases wrote num_experts.
    count = {} if "num_local_experts" in hf else {"num_experts": 60}
    hf = {**count, **hf, "norm_topk_prob": True}
    return qwen3_moe_config(_complete(hf, QWEN3_VL_MOE_DEFAULTS, 5e5))


def _drop_windows(hf: Json) -> Json:
    """`hf` without the fields of windows, which transformers does not read here."""
    names = (*WINDOW_FIELDS, "layer_types")
    return {name: value for name, value in hf.items() if name not in names}


def _complete(hf: Json, defaults: Json, theta: float) -> Json:
    """`hf` with the defaults of what is absent, the base of rope among them."""
    table = hf.get("rope_scaling") or hf.get("rope_parameters")
    has_theta = isinstance(table, dict) and "rope_theta" in table
    return complete_fields(hf, defaults if has_theta else {**defaults, "rope_theta": theta})


QWEN2_VL = text_decoder(
    "Qwen2VLForConditionalGeneration",
    {"qwen2_vl_text": qwen2_vl_config, "qwen2_vl": qwen2_vl_config},
    placeholders=PLACEHOLDERS,
    may_be_flat=True,
)
QWEN2_5_VL = text_decoder(
    "Qwen2_5_VLForConditionalGeneration",
    {"qwen2_5_vl_text": qwen2_vl_config, "qwen2_5_vl": qwen2_vl_config},
    placeholders=PLACEHOLDERS,
    may_be_flat=True,
)
QWEN3_VL = text_decoder(
    "Qwen3VLForConditionalGeneration",
    {"qwen3_vl_text": qwen3_vl_config},
    placeholders=PLACEHOLDERS,
)
QWEN3_VL_MOE = text_decoder(
    "Qwen3VLMoeForConditionalGeneration",
    {"qwen3_vl_moe_text": qwen3_vl_moe_config},
    # Published as x @ W, and saved as others by some releases of transformers.
    TensorNames(may_swap_whole=True),
    placeholders=PLACEHOLDERS,
)
LLAVA_ONEVISION = text_decoder(
    "LlavaOnevisionForConditionalGeneration",
    {"qwen2": nested_qwen2_config},
    placeholders={"image": 151646, "video": 151647},
    # A vector that stands for the end of a row of an image.
    towers=(*TOWERS, *((f"{base}image_newline", "vision tower") for base in ("", "model."))),
)
INTERNVL = text_decoder(
    "InternVLForConditionalGeneration",
    {"qwen2": nested_qwen2_config, "qwen3": nested_qwen3_config},
    placeholders={"image": 151667},
    tied=True,
)
