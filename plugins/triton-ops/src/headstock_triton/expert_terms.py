"""The sums of what each token's experts make."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstock_triton.pair_blocks import Blocks
from headstock_triton.portable import round_to


@triton.jit
def combine_kernel(
    terms,
    ids,
    out,
    width,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some columns of one token: its terms are summed in the order of its slots."""
    # The terms are not added by the product kernels: several programs would add to one row in any
    # order.
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(CHOSEN):
        # Nothing was written for padding, and for experts of other ranks.
        routed = tl.load(ids + token * CHOSEN + slot) < EXPERTS
        for part in tl.static_range(PARTS):
            pair = (part * tl.num_programs(0) + token) * CHOSEN + slot
            place = terms + pair.to(tl.int64) * width + at
            sums += tl.load(place, routed & (at < width), other=0.0).to(tl.float32)
    tl.store(
        out + token.to(tl.int64) * width + at, round_to(sums, out.dtype.element_ty), at < width
    )


def combine_terms(terms: Tensor, blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """The sum of each token's terms.

    terms: [parts of each, tokens * per_token, hidden]
    returns: [tokens, hidden] in the dtype
    """
    tokens, per_token = blocks.routes.ids.shape
    out = terms.new_empty(tokens, terms.shape[2], dtype=dtype)
    block = min(triton.next_power_of_2(out.shape[1]), 1024)
    combine_kernel[(tokens, triton.cdiv(out.shape[1], block))](
        terms,
        blocks.routes.ids,
        out,
        out.shape[1],
        EXPERTS=blocks.routes.count,
        CHOSEN=per_token,
        PARTS=len(terms),
        BLOCK=block,
        num_warps=4,
    )
    return out
