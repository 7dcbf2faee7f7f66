"""The options of `triton`."""

from __future__ import annotations

from attrs import Attribute, field, frozen
from attrs.validators import ge, instance_of, le

MOST_TOKENS = 16


def _check_tables(options: object, attribute: Attribute[str], text: str) -> None:
    if text:
        from headstock_triton.tiles import read_tables  # which imports torch and triton

        read_tables(text)


@frozen(kw_only=True)
class TritonOptions:
    """Which products this plugin's kernels make, and how kernels follow each other.

    `small_linear`: those of up to so many tokens; 0: none.
    `fused_linear`: steps of up to so many tokens have norms, activations and sums inside their
    products, where that is faster: one token of any model, several of narrow ones; 0: none.
    `split_linear`: products of up to so many tokens, and more than `fused_linear`, are cut into
    parts where they are narrow, and have the activation inside where that is faster; 0: none.
    `large_linear`: products of many tokens have activations and sums inside them.
    `pdl`: a kernel begins, and loads its weights, while the one before it ends, on GPUs from Hopper
    on.
    `fused_experts`: mixtures of experts, in 16-bit types.
    `expert_tiles`: how their work is cut up, by shape and tokens, as `headstock tune` measured it;
    empty: as measured elsewhere, or by rule.
    """

    # 1 token is where they are always as fast, on an H200: a layer's four products take 19.5 us for
    # torch's 31 at the 0.6B shape and 106 for 107 at 8B. At 2 to 8 tokens torch is faster in part.
    small_linear: int = field(default=1, validator=[instance_of(int), ge(0), le(MOST_TOKENS)])
    # On an H200 a layer of the 30B-A3B shape takes 25.6 / 124 / 255 / 1,193 us for torch's 107 /
    # 268 / 475 / 2,701, at 1 / 8 / 32 / 8,192 tokens.
    fused_experts: bool = field(default=True, validator=instance_of(bool))
    # On an H200 a layer of the 0.6B shape takes 22 / 23 / 25 / 29 / 40 us at 1 / 2 / 4 / 8 / 16
    # rows in place of 35 / 50 / 52 / 50 / 56, attention included.
    fused_linear: int = field(default=16, validator=[instance_of(int), ge(0), le(MOST_TOKENS)])
    split_linear: int = field(default=128, validator=[instance_of(int), ge(0), le(128)])
    large_linear: bool = field(default=True, validator=instance_of(bool))
    expert_tiles: str = field(default="", validator=_check_tables)
    pdl: bool = field(default=True, validator=instance_of(bool))
