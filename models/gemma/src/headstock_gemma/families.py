"""Read config.json for each family."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from headstock.nn.config_fields import Json, quoted, read_bias, read_number, read_positive
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    check_whole_heads,
    complete_fields,
    decoder_config,
    read_activation,
    read_cap,
    read_head_dim,
    read_layer_count,
    read_layer_types,
    windows_by_type,
)
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import FIELDS as ROPE_FIELDS
from headstock.nn.rope_config import ignored_rope_fields, read_rope
from headstock.spi import Head, ModelConfig, QkNorm

NAMES = TensorNames(mlp_norm="pre_feedforward_layernorm")

DEFAULTS: Json = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
GEMMA2_DEFAULTS: Json = {
    **DEFAULTS,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3_DEFAULTS: Json = {**DEFAULTS, "vocab_size": 262208, "max_position_embeddings": 131072}
"""Published files omit fields with the defaults of these transformers classes."""

FIELDS = (
    *("hidden_activation", "query_pre_attn_scalar", "sliding_window", "attention_bias"),
    *("final_logit_softcapping", "attn_logit_softcapping"),
)
GEMMA3_FIELDS = (
    *FIELDS,
    *("sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"),
)


def gemma2_config(hf: Json) -> ModelConfig:
    """Gemma-2: caps on attention scores and logits, windows in layers 0, 2, 4, ..."""
    hf = complete_fields(hf, GEMMA2_DEFAULTS)
    softcap = read_cap(hf, "attn_logit_softcapping")
    return _read_gemma(hf, "Gemma2ForCausalLM", "gemma2", softcap=softcap, pattern=2)


def gemma3_config(hf: Json) -> ModelConfig:
    """Gemma-3 text: norms of queries and keys, a rope for each kind of layer, and no cap on them.

    `attn_logit_softcapping` is stored but unused, as in transformers.
    """
    hf = complete_fields(hf, GEMMA3_DEFAULTS)
    if isinstance(hf.get("layer_types"), list) and "attention" in hf["layer_types"]:
        # There is no rope table with this name.
        raise ValueError("layer_types has 'attention'; expected full_attention, sliding_attention")
    pattern = read_positive(hf, "sliding_window_pattern", 6)
    return _read_gemma(
        hf, "Gemma3ForCausalLM", "gemma3_text", pattern=pattern, qk_norm=QkNorm.HEAD, several=True
    )


def _read_gemma(
    hf: Json,
    architecture: str,
    model_type: str,
    *,
    pattern: int,
    softcap: float = 0.0,
    qk_norm: QkNorm = QkNorm.NONE,
    several: bool = False,
) -> ModelConfig:
    """Either family.

    pattern: the last of every `pattern` layers has full attention, unless `layer_types` is given
    several: whether each kind of layer has its own rope
    """
    check_whole_heads(hf)
    types = read_layer_types(hf) or [
        "sliding_attention" if (index + 1) % pattern else "full_attention"
        for index in range(read_layer_count(hf))
    ]
    # transformers makes a window mask even if no layer has a window, and fails without one.
    window = read_positive(hf, "sliding_window")
    bias = read_bias(hf, "attention_bias")
    sources = _rope_sources(hf) if several else {}
    config = decoder_config(
        {name: value for name, value in hf.items() if not several or name not in ROPE_FIELDS},
        architecture,
        model_types=(model_type,),
        fields=GEMMA3_FIELDS if several else FIELDS,
        windows=windows_by_type(types, window),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
        activation=read_activation(hf, "hidden_activation"),
        scale=read_number(hf, "query_pre_attn_scalar") ** -0.5,
        softcap=softcap,
        ropes=[read_rope(source, read_head_dim(hf)) for source in sources.values()],
        layer_ropes=[int(several and name == "sliding_attention") for name in types],
    )
    return evolve(
        config,
        norm_offset=True,
        post_norm=True,
        embedding_scale=config.hidden**0.5,
        head=Head(softcap=read_cap(hf, "final_logit_softcapping")),
        ignored_fields=(
            *config.ignored_fields,
            *(name for source in sources.values() for name in ignored_rope_fields(source)),
        ),
    )


def _rope_sources(hf: Json) -> Mapping[str, Json]:
    """The input of `read_rope` for each kind of layer: full, then sliding.

    `rope_parameters` has a table for each. Older files have `rope_theta` and `rope_scaling` for
    full layers, and `rope_local_base_freq` for sliding ones.
    """
    tables = {} if hf.get("rope_parameters") is None else hf["rope_parameters"]
    kinds = {
        "full_attention": ("rope_theta", 1e6),
        "sliding_attention": ("rope_local_base_freq", 1e4),
    }
    if not isinstance(tables, dict) or not tables.keys() <= kinds.keys():
        raise ValueError(
            f"rope_parameters is {quoted(tables)}, expected a table for each of {', '.join(kinds)}"
        )
    sources: dict[str, Json] = {}
    for kind, (theta, default) in kinds.items():
        table = {} if tables.get(kind) is None else tables[kind]
        if not isinstance(table, dict):
            raise ValueError(f"rope_parameters.{kind} is {quoted(table)}, expected a table")
        if kind == "full_attention" and hf.get("rope_scaling") is not None:
            scaling = hf["rope_scaling"]
            if not isinstance(scaling, dict):
                raise ValueError(f"rope_scaling is {quoted(scaling)}, expected a table")
            if hf.get("rope_parameters") is not None and tables.get(kind) is None:
                # transformers fails without the table to scale.
                raise ValueError(
                    "rope_scaling has no rope_parameters.full_attention to scale; give that "
                    "table, or leave rope_parameters out"
                )
            table = {**table, **scaling}
        if "type" in table and "rope_type" not in table:
            # transformers ignores the older name here, and therefore the scaling.
            raise ValueError(
                f"the rope of {kind.replace('_', ' ')} has 'type' without 'rope_type'; expected "
                "rope_type"
            )
        # Fields outside the tables apply to both kinds.
        part = hf.get("partial_rotary_factor")
        outside = {} if part is None else {"partial_rotary_factor": part}
        numbers = {"rope_theta": hf.get(theta, default), **outside, **table}
        sources[kind] = {"rope_parameters": numbers}
    return sources


GEMMA2 = decoder(gemma2_config, NAMES)
GEMMA3 = decoder(gemma3_config, NAMES)
