"""Read config.json."""

from __future__ import annotations

from headstock.nn.config_fields import Json, read_positive
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    complete_fields,
    decoder_config,
    read_head_dim,
    uniform_windows,
)
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import ORIGINAL, read_rope
from headstock.spi import ModelConfig

NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))

DEFAULTS: Json = {
    "num_key_value_heads": None,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}

LONG = ("su", "yarn")
"""Names of LongRoPE in earlier releases. Phi-3 has no YaRN."""


def phi3_config(hf: Json) -> ModelConfig:
    """Phi-3 and Phi-4: merged projections, and partial rotation of each head."""
    hf = _rename_scaling(complete_fields(hf, DEFAULTS))
    window = None if hf.get("sliding_window") is None else read_positive(hf, "sliding_window")
    rope = read_rope(hf, read_head_dim(hf), partial=True, scalings=("default", "longrope"))
    # Every file has it, but plain rope does not use it.
    unused = ORIGINAL if rope.scaling == "default" else ""
    return decoder_config(
        {name: value for name, value in hf.items() if name != unused},
        "Phi3ForCausalLM",
        model_types=("phi3",),
        fields=("sliding_window",),
        windows=uniform_windows(hf, window),
        ropes=[rope],
    )


def _rename_scaling(hf: Json) -> Json:
    """`hf` with LongRoPE under its current name."""
    title = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    table = hf.get(title)
    if not isinstance(table, dict) or table.get("rope_type", table.get("type")) not in LONG:
        return hf
    return {**hf, title: {**table, "rope_type": "longrope"}}


PHI3 = decoder(phi3_config, NAMES)
