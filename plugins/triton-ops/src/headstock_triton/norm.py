"""Root-mean-square norms fused with their input: a sum, or an embedding look-up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstock_triton.device_function import device_function
from headstock_triton.fp8_rows import Fp8Rows, RowForm, make_rows, store_row
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import round_to


@device_function
def rms_normalize(x, gain, width, eps, dtype: tl.constexpr):
    """One row divided by its root mean square, times the weight.

    x, gain: [block] float32, x 0 outside the row
    """
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    return round_to(x * scale * gain, dtype)


@triton.jit
def add_norm_kernel(
    total,
    pending,
    weight,
    out,
    scales,
    width,
    eps,
    part_stride,
    scale_stride,
    PARTS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    EXACT: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row. The sum is rounded before the norm, as by torch's in-place addition.

    QUANTIZED: the norm is stored in FP8, as by `store_row`
    PARTS: number of parts of the term, float32 if several, summed in order; 0
    without a term.
    """
    begin_next(PDL)
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    mask = at < width
    gain = tl.load(weight + at, mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(total + row + at, mask, other=0.0)
    dtype: tl.constexpr = x.dtype
    if PARTS > 0:
        term = tl.load(pending + row + at, mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            term += tl.load(pending + part * part_stride + row + at, mask, other=0.0)
        # Rounded as the product itself would be.
        term = round_to(term, dtype).to(tl.float32)
        x = round_to(x.to(tl.float32) + term, dtype)
        tl.store(total + row + at, x, mask)
    normed = rms_normalize(x.to(tl.float32), gain, width, eps, dtype)
    if QUANTIZED:
        store_row(normed.to(tl.float32), out, scales, width, at, scale_stride, EXACT, GROUPED)
    else:
        tl.store(out + row + at, normed, mask)


# Tokens are part of one upload at any alignment: one kernel serves all.
@triton.jit(do_not_specialize_on_alignment=("tokens",))
def embed_norm_kernel(
    tokens, table, weight, total, out, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program per token.

    The first kernel of a step waits before the next may begin: later kernels read the step's page
    tables, positions and slots before they wait, and these were just written.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    gain = tl.load(weight + at, mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    begin_next(PDL)
    x = tl.load(table + tl.load(tokens + row) * width + at, mask, other=0.0)
    tl.store(total + row * width + at, x, mask)
    tl.store(
        out + row * width + at,
        rms_normalize(x.to(tl.float32), gain, width, eps, x.dtype),
        mask,
    )


def add_norm(
    total: Tensor, pending: Tensor | None, weight: Tensor, eps: float, *, pdl: bool = False
) -> Tensor:
    """`total + pending`, normalized over its last dimension, times the weight.

    total, result: [tokens, hidden]    weight: [hidden]
    pending: [tokens, hidden], or [parts, tokens, hidden] float32, which are summed in their order
    writes: total, the sum
    """
    out = torch.empty_like(total)
    _launch_norm(total, pending, weight, out, None, eps, pdl=pdl)
    return out


def quantize_norm(
    total: Tensor,
    pending: Tensor | None,
    weight: Tensor,
    eps: float,
    form: RowForm = RowForm.BY_ROW,
) -> Fp8Rows:
    """The same as `add_norm`, in FP8.   writes: total, the sum"""
    rows = make_rows(total, total.shape[1], form)
    _launch_norm(total, pending, weight, rows.values, rows, eps, pdl=False)
    return rows


def _launch_norm(
    total: Tensor,
    pending: Tensor | None,
    weight: Tensor,
    out: Tensor,
    rows: Fp8Rows | None,
    eps: float,
    *,
    pdl: bool,
) -> None:
    """Launch one program per row.   writes: total, out, the scales of rows"""
    tokens, width = total.shape
    if tokens:
        block = triton.next_power_of_2(width)
        # The kernel without a sum never reads this pointer.
        source = total if pending is None else pending
        form = None if rows is None else rows.form
        in_parts = pending is not None and pending.dim() == 3
        add_norm_kernel[(tokens,)](
            total,
            source,
            weight,
            out,
            # The kernel that does not quantize never writes to this pointer.
            out if rows is None else rows.scales,
            width,
            eps,
            total.numel(),
            0 if rows is None else len(rows.scales),
            QUANTIZED=rows is not None,
            EXACT=form is RowForm.EXACT,
            GROUPED=form is RowForm.BY_GROUP,
            PARTS=len(source) if in_parts else int(pending is not None),
            BLOCK=block,
            num_warps=count_warps(block),
            **launch_options(pdl),
        )


def embed_norm(
    tokens: Tensor, table: Tensor, weight: Tensor, eps: float, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """The tokens' embeddings, and the normalized embeddings.

    tokens: [tokens] int64
    table: [vocab, hidden]
    weight: [hidden]
    returns: twice [tokens, hidden]
    """
    width = table.shape[1]
    total = table.new_empty(len(tokens), width)
    out = torch.empty_like(total)
    if len(tokens):
        block = triton.next_power_of_2(width)
        embed_norm_kernel[(len(tokens),)](
            tokens,
            table,
            weight,
            total,
            out,
            width,
            eps,
            BLOCK=block,
            num_warps=count_warps(block),
            **launch_options(pdl),
        )
    return total, out


def count_warps(block: int) -> int:
    """Warps for a row: eight values per thread, one load in 16-bit types."""
    return min(max(block // 256, 1), 16)
