"""The gated activation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from headstock_triton.fp8_rows import Fp8Rows, RowForm, count_row_warps, make_rows, store_row
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import round_to

BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    gate_up,
    out,
    scales,
    width,
    stride,
    QUANTIZED: tl.constexpr,
    EXACT: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per row and block of columns. silu is rounded before the product, as torch does.

    QUANTIZED: the whole row is one block, stored in FP8 as by `store_row`
    """
    begin_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    wait_for_previous(PDL)
    gate = tl.load(gate_up + row * 2 * width + at, mask, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask, other=0.0)
    x = gate.to(tl.float32)
    silu = round_to(x / (1.0 + tl.exp(-x)), gate.dtype).to(tl.float32)
    result = round_to(silu * up.to(tl.float32), gate.dtype)
    if QUANTIZED:
        store_row(result.to(tl.float32), out, scales, width, at, stride, EXACT, GROUPED)
    else:
        tl.store(out + row * width + at, result, mask)


def fused_silu_and_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(first half) times the second half.   gate_up: [tokens, 2 * n]    returns: [tokens, n]"""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, width)
    if tokens:
        silu_and_mul_kernel[(tokens, triton.cdiv(width, BLOCK))](
            gate_up,
            out,
            out,  # which the kernel that does not quantize never writes to as scales
            width,
            0,
            QUANTIZED=False,
            EXACT=False,
            GROUPED=False,
            BLOCK=BLOCK,
            num_warps=4,
            **launch_options(pdl),
        )
    return out


def quantize_silu_and_mul(gate_up: Tensor, form: RowForm = RowForm.BY_ROW) -> Fp8Rows:
    """The same in FP8.   gate_up: [tokens, 2 * n]    returns: [tokens, n]"""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows, block = make_rows(gate_up, width, form), triton.next_power_of_2(width)
    if tokens:
        silu_and_mul_kernel[(tokens, 1)](
            gate_up,
            rows.values,
            rows.scales,
            width,
            len(rows.scales),
            QUANTIZED=True,
            EXACT=form is RowForm.EXACT,
            GROUPED=form is RowForm.BY_GROUP,
            BLOCK=block,
            num_warps=count_row_warps(block),
            **launch_options(False),
        )
    return rows
