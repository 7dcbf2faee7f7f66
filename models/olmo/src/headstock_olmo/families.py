"""Read config.json for each family."""

from __future__ import annotations

from attrs import evolve

from headstock.nn.config_fields import Json, quoted, read_bias, read_positive, without_nulls
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    complete_fields,
    decoder_config,
    read_head_dim,
    read_layer_count,
    read_layer_types,
    windows_by_type,
)
from headstock.nn.rope_config import FIELDS as ROPE_FIELDS
from headstock.nn.rope_config import ignored_rope_fields, read_rope, split_ropes
from headstock.spi import ModelConfig, QkNorm

OLMO3_THETAS = {"full_attention": ("rope_theta", 5e5), "sliding_attention": (None, 5e5)}
"""A base outside the tables is for full layers alone, as in transformers."""


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


def olmo3_config(hf: Json) -> ModelConfig:
    """OLMo-3: as OLMo-2, with windows in most layers and a scaled rope in the others alone."""
    defaults = {"num_key_value_heads": None, "rms_norm_eps": 1e-5, "eos_token_id": 50279}
    hf = complete_fields(hf, {**defaults, "sliding_window": 4096})
    types = read_layer_types(hf) or [
        "full_attention" if (index + 1) % 4 == 0 else "sliding_attention"
        for index in range(read_layer_count(hf))
    ]
    bias = read_bias(hf, "attention_bias")
    sources = split_ropes(hf, OLMO3_THETAS)
    config = decoder_config(
        {name: value for name, value in hf.items() if name not in ROPE_FIELDS},
        "Olmo3ForCausalLM",
        model_types=("olmo3",),
        fields=("attention_bias", "sliding_window"),
        windows=windows_by_type(types, read_positive(hf, "sliding_window")),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QkNorm.WHOLE,
        ropes=[read_rope(_drop_truncate(source), read_head_dim(hf)) for source in sources.values()],
        layer_ropes=[int(name == "sliding_attention") for name in types],
    )
    ignored = (name for source in sources.values() for name in ignored_rope_fields(source))
    return evolve(
        config,
        pre_norm=False,
        post_norm=True,
        wide_norms=True,
        ignored_fields=(*config.ignored_fields, *ignored),
    )


def _drop_truncate(source: Json) -> Json:
    """The rope of a kind of layer without `truncate`, which transformers does not find there."""
    table = source["rope_parameters"]
    return {"rope_parameters": {name: table[name] for name in table if name != "truncate"}}


def exaone4_config(hf: Json) -> ModelConfig:
    """EXAONE-4: norms after each part and of each head, windows in most layers of large models.

    Where there are windows, layers without one have no rope.
    """
    hf = complete_fields(
        without_nulls(hf, "head_dim"), {"num_key_value_heads": 32, "rms_norm_eps": 1e-5}
    )
    window = hf.get("sliding_window", 4096)
    window = None if window is None else read_positive(hf, "sliding_window", 4096)
    types = read_layer_types(hf) or _read_pattern(hf, window)
    config = decoder_config(
        hf,
        "Exaone4ForCausalLM",
        model_types=("exaone4",),
        fields=("sliding_window", "sliding_window_pattern"),
        windows=windows_by_type(types, window),
        qk_norm=QkNorm.HEAD,
        layer_ropes=[
            0 if window is None or name == "sliding_attention" else None for name in types
        ],
    )
    return evolve(config, pre_norm=False, post_norm=True)


def _read_pattern(hf: Json, window: int | None) -> list[str]:
    """Each layer's type by `sliding_window_pattern`: the last of so many is full, or L and G."""
    pattern, count = hf.get("sliding_window_pattern", 4), read_layer_count(hf)
    if window is None:
        raise ValueError(
            "layer_types: expected the type of each layer where sliding_window is null, got none"
        )
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        kinds = {"L": "sliding_attention", "G": "full_attention"}
        return [kinds[pattern[index % len(pattern)]] for index in range(count)]
    if type(pattern) is not int or pattern < 1:
        raise ValueError(
            "sliding_window_pattern: expected a number above 0, or letters L and G, got "
            f"{quoted(pattern)}"
        )
    return [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)
    ]


OLMO2 = decoder(olmo2_config)
OLMO3 = decoder(olmo3_config)
EXAONE4 = decoder(exaone4_config)
