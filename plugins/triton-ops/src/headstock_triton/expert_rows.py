"""Experts of a few tokens: each pair (token, expert) reads its weights at memory speed."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstock.spi import Weight
from headstock_triton.expert_scales import GroupScales, load_scales, scale_columns
from headstock_triton.pair_blocks import Routes
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import round_to
from headstock_triton.tiles import RowTile


@triton.jit
def gate_up_rows_kernel(
    x,
    ids,
    weight,
    scales,
    inner,
    width,
    inters,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of gate and up for one pair.

    ROW_GROUP, COLUMNS: that share a scale; 0 for a plain weight    GROUPS: scales of a row

    Each row is read whole before it is summed, so that no load waits for a sum.
    """
    # The previous kernel decides which weights a pair reads, so nothing can be preloaded. The next
    # kernel may begin only now, because it reads the pairs' experts before it waits.
    wait_for_previous(PDL)
    begin_next(PDL)
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    # Padding and experts of other ranks have a number that does not exist; they read no weight.
    if expert < EXPERTS:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at = tl.arange(0, BLOCK)[None, :]
        # The weights of all experts may exceed 32-bit indices.
        source = weight + expert.to(tl.int64) * 2 * inters * width
        # Rows past the end read the last one again, so that loads need no mask for them.
        gates = source + tl.minimum(row, inters - 1)[:, None] * width + at
        # Evict weights first: a token reads no weight twice, but every program reads the token.
        gate = tl.load(gates, at < width, other=0.0, eviction_policy="evict_first")
        up = tl.load(gates + inters * width, at < width, other=0.0, eviction_policy="evict_first")
        token = x + (pair // CHOSEN).to(tl.int64) * width
        value = tl.load(token + at, at < width, other=0.0).to(tl.float32)
        gate_terms, up_terms = gate.to(tl.float32) * value, up.to(tl.float32) * value
        if ROW_GROUP > 0:
            own = scales + expert.to(tl.int64) * (tl.cdiv(2 * inters, ROW_GROUP) * GROUPS)
            near = tl.minimum(row, inters - 1)
            factor = load_scales(own, near, BLOCK, ROW_GROUP, COLUMNS, GROUPS)
            gate_terms = scale_columns(gate_terms, factor, COLUMNS)
            factor = load_scales(own, near + inters, BLOCK, ROW_GROUP, COLUMNS, GROUPS)
            up_terms = scale_columns(up_terms, factor, COLUMNS)
        gated = tl.sum(gate_terms, 1)
        result = gated / (1.0 + tl.exp(-gated)) * tl.sum(up_terms, 1)
        tl.store(
            inner + pair.to(tl.int64) * inters + row,
            round_to(result, inner.dtype.element_ty),
            row < inters,
        )


@triton.jit
def down_rows_kernel(
    inner,
    ids,
    weights,
    weight,
    scales,
    out,
    width,
    inters,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some outputs of one token, summed over its experts in the order of its slots."""
    begin_next(PDL)
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)[None, :]
    near = tl.minimum(row, width - 1)
    inside = near[:, None] * inters + at
    # Request the weights of all slots before the values that they are multiplied by have arrived.
    factors, shares, own_scales = (), (), ()
    for slot in tl.static_range(CHOSEN):
        expert = tl.load(ids + token * CHOSEN + slot)
        there = expert < EXPERTS
        share = tl.where(there, tl.load(weights + token * CHOSEN + slot), 0.0)
        source = weight + expert.to(tl.int64) * width * inters + inside
        factor = tl.load(source, there & (at < inters), other=0.0, eviction_policy="evict_first")
        factors = factors + (factor,)  # type: ignore[assignment]  # noqa: RUF005
        shares = shares + (share,)  # type: ignore[assignment]  # noqa: RUF005
        if ROW_GROUP > 0:
            # Of an expert that is there: the share of another is 0.
            held = tl.where(there, expert, 0).to(tl.int64)
            own = scales + held * (tl.cdiv(width, ROW_GROUP) * GROUPS)
            found = load_scales(own, near, BLOCK, ROW_GROUP, COLUMNS, GROUPS)
            own_scales = own_scales + (found,)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_previous(PDL)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    # One program for all experts of a token: no atomics, and a fixed order of the sum.
    for slot in tl.static_range(CHOSEN):
        pair = token * CHOSEN + slot
        # Nothing was written for padding and for experts of other ranks, whose weight is 0.
        mask = (tl.load(ids + pair) < EXPERTS) & (at < inters)
        value = tl.load(inner + pair.to(tl.int64) * inters + at, mask, other=0.0)
        term = factors[slot].to(tl.float32) * (value.to(tl.float32) * shares[slot])
        if ROW_GROUP > 0:
            term = scale_columns(term, own_scales[slot], COLUMNS)
        sums += term
    total = round_to(tl.sum(sums, 1), out.dtype.element_ty)
    tl.store(out + token.to(tl.int64) * width + row, total, row < width)


def can_take_rows(weight: Weight) -> bool:
    """Whether the kernels take such experts: plain, or in 8 bits in groups of whole columns."""
    if weight.bias is not None:
        return False
    scales = GroupScales.of(weight)
    width = weight.tensor.shape[2]
    is_scaled = scales is not None and scales.count_columns(width) is not None
    return weight.format is None or (is_scaled and weight.tensor.dtype.itemsize == 1)


def mix_rows(
    x: Tensor, routes: Routes, gate_up: Weight, down: Weight, tile: RowTile, *, pdl: bool = False
) -> Tensor:
    """The weighted sum of the outputs of each token's experts; 0 for padding.

    x, result: [tokens, hidden]
    gate_up: [experts, 2 * intermediate, hidden]    down: [experts, hidden, intermediate], both as
        `can_take_rows` says
    """
    tokens, width = x.shape
    inters = down.tensor.shape[2]
    per_token = routes.ids.shape[1]
    inner = x.new_empty(tokens * per_token, inters)
    out = torch.empty_like(x)
    _launch_rows(
        gate_up_rows_kernel,
        (x, routes.ids),
        gate_up,
        (inner, width, inters),
        (triton.cdiv(inters, tile.gate_up), tokens * per_token),
        pdl=pdl,
        EXPERTS=routes.count,
        CHOSEN=per_token,
        ROWS=tile.gate_up,
        num_warps=tile.warps,
    )
    _launch_rows(
        # A separate launch: a sum needs all inner values of its pairs, and programs of one launch
        # cannot wait for each other.
        down_rows_kernel,
        (inner, routes.ids, routes.weights),
        down,
        (out, width, inters),
        (triton.cdiv(width, tile.down), tokens),
        pdl=pdl,
        EXPERTS=routes.count,
        CHOSEN=per_token,
        ROWS=tile.down,
        num_warps=tile.warps,
    )
    return out


def _launch_rows(
    kernel: Any,
    before: tuple[Any, ...],
    weight: Weight,
    after: tuple[Any, ...],
    grid: tuple[int, int],
    *,
    pdl: bool,
    **constants: int,
) -> None:
    """Launch a product with the weight.   before, after: the arguments around it"""
    scales, width = GroupScales.of(weight), weight.tensor.shape[2]
    columns = 0 if scales is None else scales.count_columns(width)
    kernel[grid](
        *before,
        weight.tensor,
        # A pointer that the kernel of a plain weight does not read.
        weight.tensor if scales is None else scales.numbers,
        *after,
        BLOCK=triton.next_power_of_2(width),
        ROW_GROUP=0 if scales is None else scales.rows,
        COLUMNS=columns,
        GROUPS=0 if scales is None else scales.numbers.shape[2],
        **constants,
        **launch_options(pdl),
    )
