"""Pure functions over tensors, and the one decoder that every model family is.

Functions whose names end in `_` write in place.
"""

from __future__ import annotations

__all__ = [
    "attention",
    "config_fields",
    "config_keys",
    "decoder",
    "decoder_config",
    "eager_step",
    "kv",
    "latent_parameters",
    "mlp",
    "moe",
    "noise",
    "norm",
    "param_specs",
    "parameters",
    "penalties",
    "rope",
    "rope_config",
    "sampler",
    "shard",
    "short_conv",
    "text_decoder",
    "truncation",
]
