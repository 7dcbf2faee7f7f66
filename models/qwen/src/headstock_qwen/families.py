"""Read config.json for each family."""

from __future__ import annotations

from attrs import evolve

from headstock.nn.config_fields import (
    Json,
    quoted,
    read_bias,
    read_flag,
    read_positive,
    read_whole,
)
from headstock.nn.decoder import decoder
from headstock.nn.decoder_config import (
    complete_fields,
    decoder_config,
    read_layer_count,
    read_layer_types,
    uniform_windows,
    windows_by_type,
)
from headstock.spi import Experts, ModelConfig, QkNorm

WINDOW_FIELDS = ("use_sliding_window", "sliding_window", "max_window_layers")
QWEN3_FIELDS = (*WINDOW_FIELDS, "attention_bias", "use_qk_norm", "qk_norm")
EXPERT_FIELDS = (
    *(
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
    ),
    *("decoder_sparse_step", "mlp_only_layers"),
)


def qwen2_config(hf: Json) -> ModelConfig:
    """Qwen2: biases on queries, keys and values."""
    hf = complete_fields(hf, {})
    return decoder_config(
        hf,
        "Qwen2ForCausalLM",
        model_types=("qwen2",),
        fields=WINDOW_FIELDS,
        windows=_read_windows(hf),
        default_kv_heads=32,
        qkv_bias=True,
    )


def qwen3_config(hf: Json) -> ModelConfig:
    """Qwen3: normalized queries and keys, heads of 128 by default."""
    hf = complete_fields(hf, {})
    bias = read_bias(hf, "attention_bias")
    return decoder_config(
        hf,
        "Qwen3ForCausalLM",
        model_types=("qwen3",),
        fields=QWEN3_FIELDS,
        windows=_read_windows(hf),
        default_head_dim=128,
        default_kv_heads=32,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QkNorm.HEAD,
    )


def qwen3_moe_config(hf: Json) -> ModelConfig:
    """Qwen3-MoE: like Qwen3, with experts in most layers and one window for all layers."""
    bias = read_bias(hf, "attention_bias")
    return decoder_config(
        hf,
        "Qwen3MoeForCausalLM",
        model_types=("qwen3_moe",),
        fields=(*QWEN3_FIELDS, *EXPERT_FIELDS),
        windows=uniform_windows(hf, _read_window(hf)),
        experts=make_layer_experts(hf),
        default_kv_heads=4,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=QkNorm.HEAD,
    )


def qwen2_moe_config(hf: Json) -> ModelConfig:
    """Qwen2-MoE: experts in most layers, and one shared by all tokens, behind a gate."""
    # transformers reads num_local_experts for Qwen3-MoE only.
    hf = {name: value for name, value in hf.items() if name != "num_local_experts"}
    window, types = _read_window(hf), read_layer_types(hf)
    # transformers requires its width even if no layer has a window.
    if window is None and read_flag(hf, "use_sliding_window", False):
        raise ValueError("sliding_window: expected a number with use_sliding_window, got null")
    first = read_whole(hf, "max_window_layers", 28)
    # Windows in layers 0, 2, 4, ... below `max_window_layers`, unlike Qwen2.
    windows = (
        [
            window if index % 2 == 0 and index < first else None
            for index in range(read_layer_count(hf))
        ]
        if types is None
        else windows_by_type(types, window)
    )
    shared = read_positive(hf, "shared_expert_intermediate_size", 5632)
    experts = make_layer_experts(hf, count=60, per_token=4, intermediate=1408)
    return decoder_config(
        hf,
        "Qwen2MoeForCausalLM",
        model_types=("qwen2_moe",),
        fields=(*WINDOW_FIELDS, *EXPERT_FIELDS, "shared_expert_intermediate_size", "qkv_bias"),
        windows=windows,
        experts=[
            None if each is None else evolve(each, shared=shared, shared_gate=True)
            for each in experts
        ],
        default_kv_heads=16,
        qkv_bias=read_bias(hf, "qkv_bias", default=True),
    )


def _read_window(hf: Json) -> int | None:
    """The window of sliding layers: `sliding_window` (4096 if absent) if `use_sliding_window`."""
    if not read_flag(hf, "use_sliding_window", False) or hf.get("sliding_window", 4096) is None:
        return None
    return read_positive(hf, "sliding_window", 4096)


def _read_windows(hf: Json) -> list[int | None]:
    """Each layer's window: from `layer_types`, or else from layer `max_window_layers` on."""
    window, types = _read_window(hf), read_layer_types(hf)
    if types is not None:
        return windows_by_type(types, window)
    first = read_whole(hf, "max_window_layers", 28)
    return [window if index >= first else None for index in range(read_layer_count(hf))]


def make_layer_experts(
    hf: Json, *, count: int = 128, per_token: int = 8, intermediate: int = 768
) -> list[Experts | None]:
    """Each layer's experts: every `decoder_sparse_step`-th layer except `mlp_only_layers`."""
    # transformers 5 writes num_local_experts where earlier releases wrote num_experts.
    count = read_positive(
        hf, "num_local_experts" if "num_local_experts" in hf else "num_experts", count
    )
    per_token = read_positive(hf, "num_experts_per_tok", per_token)
    if per_token > count:
        raise ValueError(f"num_experts_per_tok: expected at most {count}, got {per_token}")
    experts = Experts(
        count=count,
        per_token=per_token,
        intermediate=read_positive(hf, "moe_intermediate_size", intermediate),
        renormalize=read_flag(hf, "norm_topk_prob", False),
    )
    step, dense = read_whole(hf, "decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    if step < 1:
        raise ValueError(f"decoder_sparse_step: expected a number above 0, got {step}")
    if not isinstance(dense, list | tuple):
        raise ValueError(f"mlp_only_layers: expected a list of layers, got {quoted(dense)}")
    return [
        None if (index + 1) % step or index in dense else experts
        for index in range(read_layer_count(hf))
    ]


QWEN2 = decoder(qwen2_config)
QWEN2_MOE = decoder(qwen2_moe_config)
QWEN3 = decoder(qwen3_config)
QWEN3_MOE = decoder(qwen3_moe_config)
