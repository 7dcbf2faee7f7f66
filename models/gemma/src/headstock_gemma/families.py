"""Read config.json for each family."""

from __future__ import annotations

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
from headstock.nn.rope_config import ignored_rope_fields, read_rope, split_ropes
from headstock.nn.text_decoder import text_decoder
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
ROPE_THETAS = {
    "full_attention": ("rope_theta", 1e6),
    "sliding_attention": ("rope_local_base_freq", 1e4),
}
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
        raise ValueError(
            "layer_types: expected full_attention or sliding_attention, got 'attention'"
        )
    pattern = read_positive(hf, "sliding_window_pattern", 6)
    return _read_gemma(
        hf, "Gemma3ForCausalLM", "gemma3_text", pattern=pattern, qk_norm=QkNorm.HEAD, several=True
    )


def gemma3_beside_images_config(hf: Json) -> ModelConfig:
    """The text of Gemma-3 with images, whose logits no release of transformers bounds."""
    cap = hf.get("final_logit_softcapping")
    if cap is not None:
        raise ValueError(f"final_logit_softcapping: expected null beside images, got {quoted(cap)}")
    return gemma3_config(hf)


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
    sources = split_ropes(hf, ROPE_THETAS) if several else {}
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


GEMMA2 = decoder(gemma2_config, NAMES)
GEMMA3 = decoder(gemma3_config, NAMES)
GEMMA3_TEXT = text_decoder(
    "Gemma3ForConditionalGeneration",
    {"gemma3_text": gemma3_beside_images_config},
    NAMES,
    placeholders={"image": 262144},
    tied=True,
)
