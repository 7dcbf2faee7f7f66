"""Merge the two parts of attention over shared prefixes, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADS_A_PROGRAM = 16


@triton.jit
def merge_kernel(
    out,
    lse,
    prefix_out,
    prefix_lse,
    shared_lens,
    out_row,
    prefix_row,
    lse_row,
    lse_head,
    prefix_lse_row,
    prefix_lse_head,
    heads,
    dim,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One row and some of its heads; a row that shares nothing is unchanged."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    at = tl.arange(0, BLOCK_DIM)
    # A mask rather than a branch: without sharing, nothing of the prefix is read.
    is_head = (head < heads) & (tl.load(shared_lens + row) > 0)
    here = lse + row * lse_row + head * lse_head
    first = tl.load(prefix_lse + row * prefix_lse_row + head * prefix_lse_head, is_head, other=0.0)
    second = tl.load(here, is_head, other=0.0)
    most = tl.maximum(first, second)
    weight, rest = tl.exp(first - most), tl.exp(second - most)
    total = weight + rest

    mask = is_head[:, None] & (at < dim)[None, :]
    place = head[:, None] * dim + at[None, :]
    prefix = tl.load(prefix_out + row * prefix_row + place, mask, other=0.0)
    own = tl.load(out + row * out_row + place, mask, other=0.0)
    merged = (
        prefix.to(tl.float32) * (weight / total)[:, None]
        + own.to(tl.float32) * (rest / total)[:, None]
    )
    tl.store(out + row * out_row + place, merged.to(own.dtype), mask)
    tl.store(here, most + tl.log(total), is_head)


def merge_prefixes(
    out: Tensor,
    lse: Tensor,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    shared_lens: Tensor,
) -> None:
    """Merge attention over shared prefixes into that over the rest of each row's tokens.

    Same as `headstock.nn.attention.merge`, in one launch.

    out, prefix_out: [rows, heads, head_dim], the heads of a row dense
    lse, prefix_lse: [rows, heads] float32, natural logarithm, of any strides
    shared_lens: [rows] int32
    writes: out; lse, natural logarithms of the sums over both parts
    """
    rows, heads, dim = out.shape
    block_heads = min(HEADS_A_PROGRAM, triton.next_power_of_2(heads))
    merge_kernel[(rows, triton.cdiv(heads, block_heads))](
        out,
        lse,
        prefix_out,
        prefix_lse,
        shared_lens,
        out.stride(0),
        prefix_out.stride(0),
        *lse.stride(),
        *prefix_lse.stride(),
        heads,
        dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=triton.next_power_of_2(dim),
    )
