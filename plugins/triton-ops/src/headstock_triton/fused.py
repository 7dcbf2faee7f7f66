"""What the fused operations of `triton` support."""

from __future__ import annotations

from collections.abc import Mapping

from headstock.spi import Variant

COMMON = frozenset((Variant.WIDE_NORM,))
"""Variants that all fused operations support: the kernels widen their inputs."""

FUSED: Mapping[str, frozenset[Variant]] = {
    "embed": COMMON,
    "qkv_rope_store": COMMON
    | {
        Variant.HEAD_QK_NORM,
        Variant.KV_SCALES,
        Variant.PARTIAL_ROPE,
        Variant.ROPE_BY_LAYER,
        Variant.SIZES_BY_LAYER,
    },
    "attn_out": frozenset((Variant.SIZES_BY_LAYER,)),
    "short_conv": COMMON,
    "delta_rule": COMMON,
    "mlp": COMMON | {Variant.SIZES_BY_LAYER},
    "moe": COMMON
    | {
        Variant.CLAMPED_GATE,
        Variant.EXPERT_BIAS,
        Variant.EXPERT_SHARD,
        Variant.SCORE_BIAS,
    },
    "final_norm": COMMON,
    "lm_head_sample": frozenset((Variant.VOCAB_SHARD,)),
}
"""Operations with separate kernels -> the variants that they support."""
