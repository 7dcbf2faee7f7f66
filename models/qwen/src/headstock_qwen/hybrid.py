"""Read config.json of Qwen3-Next and Qwen3.5: gated delta rules in most layers, gated attention in
the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from attrs import evolve

from headstock.nn.config_fields import (
    Json,
    read_bias,
    read_flag,
    read_positive,
    read_whole,
    without_nulls,
)
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    complete_fields,
    decoder_config,
    read_head_dim,
    read_layer_count,
    read_layer_types,
)
from headstock.nn.delta_parameters import DeltaNames
from headstock.nn.draft_layers import DraftNames
from headstock.nn.parameters import TensorNames
from headstock.nn.rope_config import FIELDS as ROPE_FIELDS
from headstock.nn.rope_config import drop_sections, ignored_rope_fields, read_rope
from headstock.nn.text_decoder import text_decoder
from headstock.spi import DeltaRule, Experts, ModelConfig, QkNorm, Rope
from headstock_qwen.families import make_layer_experts

LINEAR, FULL = "linear_attention", "full_attention"

DENSE_DEFAULTS: Json = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE_DEFAULTS: Json = {
    **DENSE_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
NEXT_DEFAULTS: Json = {
    **MOE_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
"""Published files omit fields with the defaults of these transformers classes."""

SHARE = "partial_rotary_factor"
INTERVAL = 4
"""The last of so many layers has attention, unless `layer_types` or a field says otherwise."""

NEXT_FIELDS = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "full_attention_interval"),
    *("attention_bias", "mtp_num_hidden_layers"),
)
FIELDS = (
    *NEXT_FIELDS,
    *("mtp_use_dedicated_embeddings", "attn_output_gate"),
    "mamba_ssm_dtype",
)
MOE_FIELDS = (
    *("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok"),
    "num_experts",
)
NEXT_MOE_FIELDS = (*MOE_FIELDS, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")

NAMES = TensorNames(left_out=("mtp.",), drafts=DraftNames())
NEXT_NAMES = evolve(
    NAMES,
    delta=DeltaNames(by_key_head=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
)


def qwen3_5_config(hf: Json) -> ModelConfig:
    """Qwen3.5: gated delta rules in three of four layers."""
    hf = drop_sections(complete_fields(hf, DENSE_DEFAULTS))
    return _read(hf, "Qwen3_5ForCausalLM", "qwen3_5_text", FIELDS)


def qwen3_5_moe_config(hf: Json) -> ModelConfig:
    """Qwen3.5 with experts in all layers, and one shared by all tokens, behind a gate."""
    hf = drop_sections(complete_fields(hf, MOE_DEFAULTS))
    count, used = read_positive(hf, "num_experts"), read_positive(hf, "num_experts_per_tok")
    if used > count:
        raise ValueError(f"num_experts_per_tok: expected at most {count}, got {used}")
    experts = Experts(
        count=count,
        per_token=used,
        intermediate=read_positive(hf, "moe_intermediate_size"),
        renormalize=True,
        shared=read_positive(hf, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return _read(
        hf,
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        (*FIELDS, *MOE_FIELDS),
        [experts] * read_layer_count(hf),
    )


def qwen3_next_config(hf: Json) -> ModelConfig:
    """Qwen3-Next: Qwen3.5 with experts in most layers, and maps of delta rules by key head."""
    hf = complete_fields(hf, NEXT_DEFAULTS)
    shared = read_positive(hf, "shared_expert_intermediate_size")
    # transformers reads num_local_experts for Qwen3-MoE only.
    experts = make_layer_experts(
        {name: value for name, value in hf.items() if name != "num_local_experts"}
    )
    return _read(
        hf,
        "Qwen3NextForCausalLM",
        "qwen3_next",
        (*NEXT_FIELDS, *NEXT_MOE_FIELDS),
        [
            None if each is None else evolve(each, shared=shared, shared_gate=True)
            for each in experts
        ],
    )


def _read(
    hf: Json,
    architecture: str,
    model_type: str,
    fields: Collection[str],
    experts: Sequence[Experts | None] | None = None,
) -> ModelConfig:
    """The decoder of any of them; the arguments are those of `decoder_config`.

    raises: ValueError
    """
    hf = without_nulls(hf, "layer_types")
    count = read_layer_count(hf)
    interval = read_positive(hf, "full_attention_interval", INTERVAL)
    types = read_layer_types(hf, (LINEAR, FULL)) or [
        LINEAR if (index + 1) % interval else FULL for index in range(count)
    ]
    if FULL not in types:
        raise ValueError(f"layer_types: expected {FULL} for some layer, got {LINEAR} for all")
    delta, rope, bias = _read_delta(hf), _read_rope(hf), read_bias(hf, "attention_bias")
    config = decoder_config(
        {name: value for name, value in hf.items() if name not in ROPE_FIELDS},
        architecture,
        model_types=(model_type,),
        fields=fields,
        windows=[None] * count,
        convs=[delta if kind == LINEAR else None for kind in types],
        experts=experts,
        gates=True,
        qkv_bias=bias,
        out_bias=bias,
        ropes=[rope],
        qk_norm=QkNorm.HEAD,
    )
    ignored = (*config.ignored_fields, *ignored_rope_fields(hf))
    return evolve(config, norm_offset=True, ignored_fields=ignored)


def _read_delta(hf: Json) -> DeltaRule:
    """The sizes of gated delta rules.   raises: ValueError"""
    keys, values = (read_positive(hf, f"linear_num_{name}_heads") for name in ("key", "value"))
    if values % keys:
        raise ValueError(
            f"linear_num_value_heads: expected a multiple of linear_num_key_heads ({keys}), got "
            f"{values}"
        )
    taps = read_positive(hf, "linear_conv_kernel_dim")
    if taps < 2:
        raise ValueError(f"linear_conv_kernel_dim: expected 2 or more, got {taps}")
    return DeltaRule(
        key_heads=keys,
        value_heads=values,
        key_dim=read_positive(hf, "linear_key_head_dim"),
        value_dim=read_positive(hf, "linear_value_head_dim"),
        taps=taps,
    )


def _read_rope(hf: Json) -> Rope:
    """The rope of text, of a quarter of each head unless the file says otherwise."""
    tables = (hf.get("rope_parameters"), hf.get("rope_scaling"))
    has_share = any(isinstance(each, Mapping) and SHARE in each for each in tables)
    stated = hf if has_share or SHARE in hf else {**hf, SHARE: 0.25}
    return read_rope(stated, read_head_dim(hf), partial=True)


DRAFT_LAYERS = "mtp_num_hidden_layers"


def _add_draft_layers(
    read: Callable[[Json], ModelConfig], hf: Json, config: ModelConfig
) -> ModelConfig:
    """The decoder with the layers that guess further tokens, which have attention.

    read: makes the decoder of its fields
    raises: ValueError
    """
    # Files of Qwen3-Next have one such layer and no field for it.
    count = read_whole(hf, DRAFT_LAYERS, 1 if config.architecture.startswith("Qwen3Next") else 0)
    if not count:
        raise ValueError(f"{DRAFT_LAYERS} in config.json is 0: the checkpoint has none")
    if read_flag(hf, "mtp_use_dedicated_embeddings", False, may_be_null=True):
        raise ValueError("mtp_use_dedicated_embeddings: embeddings of their own are not computed")
    types = [LINEAR if layer.delta is not None else FULL for layer in config.layers]
    drafted = read(
        {**hf, "num_hidden_layers": len(types) + count, "layer_types": [*types, *[FULL] * count]}
    )
    return evolve(config, layers=drafted.layers, kv_groups=drafted.kv_groups, draft_layers=count)


def _read_drafts(read: Callable[[Json], ModelConfig], hf: Json, config: ModelConfig) -> ModelConfig:
    """The same for a config.json that has the decoder's fields in `text_config`, or its own."""
    text = hf.get("text_config")
    return _add_draft_layers(read, text if isinstance(text, Mapping) else hf, config)


QWEN3_NEXT = decoder(qwen3_next_config, NEXT_NAMES, partial(_read_drafts, qwen3_next_config))
QWEN3_5 = decoder(qwen3_5_config, NAMES, partial(_read_drafts, qwen3_5_config))
QWEN3_5_MOE = decoder(qwen3_5_moe_config, NAMES, partial(_read_drafts, qwen3_5_moe_config))
PLACEHOLDERS = {"image": 248056, "video": 248057}
QWEN3_5_BESIDE_IMAGES = text_decoder(
    "Qwen3_5ForConditionalGeneration",
    {"qwen3_5_text": qwen3_5_config},
    NAMES,
    placeholders=PLACEHOLDERS,
    draft_config=partial(_read_drafts, qwen3_5_config),
)
QWEN3_5_MOE_BESIDE_IMAGES = text_decoder(
    "Qwen3_5MoeForConditionalGeneration",
    {"qwen3_5_moe_text": qwen3_5_moe_config},
    NAMES,
    placeholders=PLACEHOLDERS,
    draft_config=partial(_read_drafts, qwen3_5_moe_config),
)
