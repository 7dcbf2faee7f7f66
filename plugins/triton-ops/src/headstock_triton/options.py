"""The options of `triton`."""

from __future__ import annotations

from typing import Literal

from attrs import Attribute, field, frozen
from attrs.validators import ge, in_, instance_of, le

MOST_TOKENS = 16


def _check_tables(options: object, attribute: Attribute[str], text: str) -> None:
    if text:
        from headstock_triton.tiles import read_tables  # which imports torch and triton

        read_tables(text)


def _check_size(options: object, attribute: Attribute[int], size: int) -> None:
    if size % 4096:
        raise ValueError(f"expected a multiple of 4096 bytes, got {size}")


@frozen(kw_only=True)
class TritonOptions:
    """Which products this plugin's kernels compute, and how kernels overlap.

    `small_linear`: those of up to this number of tokens, not all of them of any width; 0: none.
    `fused_linear`: steps of up to this number of tokens have norms, activations and sums inside
    their products, where that is faster: one token of any model, several of narrow ones; 0: none.
    `split_linear`: products of up to this number of tokens, and more than `fused_linear`, are cut
    into parts if they are narrow, and include the activation where that is faster; 0: none.
    `few_linear`: products of 2 to 16 tokens with wide maps share their depth among programs. auto:
    where ranks share a model.
    `large_linear`: products of many tokens include activations and sums.
    `pdl`: a kernel begins, and loads its weights, while the one before it ends, on GPUs from Hopper
    on.
    `fused_experts`: mixtures of experts, in 16-bit types.
    `chosen_experts`: those too whose experts torch must choose, such as by sigmoids.
    `delta_rule`: gated delta rules in 16-bit types, of memories whose sizes the kernels take.
    `push_bytes`: sums and joins over ranks of up to this size are kernels that write to the other
    ranks' memory, where devices allow it; 0: none.
    `packed`: maps and experts in 8 and 4 bits stay packed, on GPUs from Hopper on; else they are
    dequantized at load. auto: of bfloat16 models on Hopper maps in FP8 by row, tensor or blocks of
    128 x 128, INT4 and MXFP4, and experts in 4 bits.
    `word_tokens`: products of up to this number of tokens read maps in INT4, INT8 and MXFP4 as they
    are; those of more make them plain in each step.
    `expert_tiles`: their tile sizes, by shape and tokens, as `headstock tune` measured them; empty:
    built-in measurements, or a rule.
    """

    # On an H200, only 1 token is never slower than torch: a layer's four products take 19.5 us
    # instead of 31 at the 0.6B shape, and 106 instead of 107 at 8B. At 2 to 8 tokens torch is
    # sometimes faster.
    small_linear: int = field(default=1, validator=[instance_of(int), ge(0), le(MOST_TOKENS)])
    # On an H200 a layer of the 30B-A3B shape takes 25.6 / 124 / 255 / 1,193 us at 1 / 8 / 32 /
    # 8,192 tokens; torch takes 107 / 268 / 475 / 2,701.
    fused_experts: bool = field(default=True, validator=instance_of(bool))
    # GPT-OSS-20B on an H200 with experts chosen by torch: 376 tokens a second for one row, 178
    # where torch multiplies them too.
    chosen_experts: bool = field(default=True, validator=instance_of(bool))
    # On an H200 a layer's rule of the 27B shape (48 heads of 128 by 128) takes 4.3 us for a row's
    # next token, and 370 us for a prompt of 4,096 tokens; torch takes 138 us, and 70 ms for a
    # prompt of 1,024.
    delta_rule: bool = field(default=True, validator=instance_of(bool))
    # On an H200 a layer of the 0.6B shape takes 22 / 23 / 25 / 29 / 40 us at 1 / 2 / 4 / 8 / 16
    # rows, including attention; 35 / 50 / 52 / 50 / 56 without this.
    fused_linear: int = field(default=16, validator=[instance_of(int), ge(0), le(MOST_TOKENS)])
    split_linear: int = field(default=128, validator=[instance_of(int), ge(0), le(128)])
    # 8 rows of 8B on two H200s: 2,377 tokens a second without, 2,477 with them. On one H200 each
    # product alone is as fast or faster by this kernel, and a whole step takes a sixth longer.
    few_linear: Literal["auto", "on", "off"] = field(
        default="auto", validator=in_(("auto", "on", "off"))
    )
    large_linear: bool = field(default=True, validator=instance_of(bool))
    # Two H200s: 2.7 / 3.1 / 5.0 / 9.6 us for 1 / 8 / 64 / 256 rows of 4,096; NCCL takes 6.7 / 7.2 /
    # 10.0 / 26.6.
    push_bytes: int = field(default=1 << 22, validator=[instance_of(int), ge(0), _check_size])
    # On an H200 the four products of a layer of 8B take 41 (INT4) to 65 us (FP8) at 1 row, plain
    # ones 113; at 8 rows those of 4 bits take 43 to 47, plain ones 117.
    packed: Literal["auto", "on", "off"] = field(
        default="auto", validator=in_(("auto", "on", "off"))
    )
    # `offline256` of 8B in INT4 on an H200: 7,520 tokens a second; with 256 here 6,438.
    word_tokens: int = field(default=64, validator=[instance_of(int), ge(64), le(4096)])
    expert_tiles: str = field(default="", validator=_check_tables)
    pdl: bool = field(default=True, validator=instance_of(bool))
