"""The operations on a layer's heads between projection and attention, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import round_to

FEW_TOKENS = 64
"""Up to this number of tokens, more and smaller programs use the device better."""


@device_function
def _store_q_and_kv(
    x, factor, at, q, pool, q_mask, kv_mask, SCALED: tl.constexpr, LIMIT: tl.constexpr
):
    """Store queries to `q` and keys and values to the pool; 8-bit floats saturate and keep NaN.

    x: [heads, n]    factor: [heads], of keys and values, if SCALED
    """
    tl.store(q[:, None] + at, x, q_mask)
    kv = x
    if SCALED:
        kv = x.to(tl.float32) * factor[:, None]
    if LIMIT > 0:
        kv = kv.to(tl.float32)
        kv = tl.where(kv > LIMIT, LIMIT, tl.where(kv < -LIMIT, -LIMIT, kv))
    tl.store(pool[:, None] + at, round_to(kv, pool.dtype.element_ty), kv_mask)


# Positions and slots are parts of one upload at any alignment: one kernel serves all.
@triton.jit(do_not_specialize_on_alignment=("positions", "slots"))
def heads_kernel(
    qkv,
    weight,
    table,
    positions,
    slots,
    q_out,
    pool,
    eps,
    k_factor,
    v_factor,
    page_stride,
    side_stride,
    slot_stride,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token and `BLOCK` of its heads: optional norm, rope, and the store of q, k and v.

    A head is split into the two halves that rotate together and the rest that does not rotate.

    Every step is rounded as the torch operations round it.
    """
    begin_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    exists = head < HEADS + 2 * KV_HEADS
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    dtype: tl.constexpr = qkv.dtype.element_ty
    half = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = exists[:, None] & (half < HALF)
    is_turned, is_passed = (~is_value)[:, None], is_value[:, None]
    if REST_BLOCK:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        in_rest = exists[:, None] & (rest < HEAD_DIM)

    # Everything here is not written by the kernels just before this one.
    angle = table + tl.load(positions + token) * (2 * HALF) + half
    # Rounded first, because the torch operations use them in the type of the heads.
    cos = round_to(tl.load(angle, half < HALF, other=0.0), dtype).to(tl.float32)
    sin = round_to(tl.load(angle + HALF, half < HALF, other=0.0), dtype).to(tl.float32)
    slot = tl.load(slots + token)
    if NORM:
        row = weight + head[:, None] * HEAD_DIM
        first_gain = tl.load(row + half, in_half & is_turned, other=0.0).to(tl.float32)
        second_gain = tl.load(row + HALF + half, in_half & is_turned, other=0.0).to(tl.float32)
        if REST_BLOCK:
            third_gain = tl.load(row + rest, in_rest & is_turned, other=0.0).to(tl.float32)
    wait_for_previous(PDL)

    first = tl.load(source[:, None] + half, in_half, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + HALF + half, in_half, other=0.0).to(tl.float32)
    if REST_BLOCK:
        third = tl.load(source[:, None] + rest, in_rest, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST_BLOCK:
            square += tl.sum(third * third, 1)
        scale = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        normed = round_to(round_to(first * scale, dtype).to(tl.float32) * first_gain, dtype)
        first = tl.where(is_passed, first, normed)
        normed = round_to(round_to(second * scale, dtype).to(tl.float32) * second_gain, dtype)
        second = tl.where(is_passed, second, normed)
        if REST_BLOCK:
            normed = round_to(round_to(third * scale, dtype).to(tl.float32) * third_gain, dtype)
            third = tl.where(is_passed, third, normed)

    turned_first = round_to(round_to(first * cos, dtype).to(tl.float32) - second * sin, dtype)
    turned_second = round_to(round_to(second * cos, dtype).to(tl.float32) + first * sin, dtype)
    turned_first = tl.where(is_passed, round_to(first, dtype), turned_first)
    turned_second = tl.where(is_passed, round_to(second, dtype), turned_second)

    cell = pool + (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * slot_stride
    cell = cell + is_value.to(tl.int64) * side_stride
    # Negative offsets for queries, whose stores to the pool are masked.
    cell = cell + (head - HEADS - is_value.to(tl.int32) * KV_HEADS) * head_stride
    query = q_out + (token * HEADS + head) * HEAD_DIM
    # Tokens that pad a graph all write to the first slot of the dummy page. Which one wins is
    # undefined, and no row's answer depends on it. Other slots have one token each.
    to_q, to_pool = is_query[:, None], (~is_query)[:, None]
    factor = tl.where(is_value, v_factor, k_factor)
    q_mask, kv_mask = in_half & to_q, in_half & to_pool
    _store_q_and_kv(turned_first, factor, half, query, cell, q_mask, kv_mask, SCALED, LIMIT)
    _store_q_and_kv(turned_second, factor, HALF + half, query, cell, q_mask, kv_mask, SCALED, LIMIT)
    if REST_BLOCK:
        third = round_to(third, dtype)
        q_mask, kv_mask = in_rest & to_q, in_rest & to_pool
        _store_q_and_kv(third, factor, rest, query, cell, q_mask, kv_mask, SCALED, LIMIT)


def rope_and_store_kv(
    qkv: Tensor,
    weight: Tensor | None,
    table: Tensor,
    positions: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    heads: int,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    pdl: bool = False,
) -> Tensor:
    """Queries after norm and rope; keys, treated likewise, and values go to the pool, scaled.

    qkv: [tokens, (heads + 2 * kv_heads) * head_dim]    weight: [heads + kv_heads, head_dim] or None
    table: [max_seq_len, 2, dim / 2] float32            positions, slots: [tokens] int64
    pdl: positions and slots are read before the wait and must be older than the kernel before
    returns: [tokens, heads, head_dim]
    writes: pool [pages, 2, page_size, kv_heads, head_dim]
    """
    page_size, kv_heads, head_dim = pool.shape[2:]
    tokens, half = len(positions), table.shape[2]
    q = qkv.new_empty(tokens, heads, head_dim)
    if not tokens:
        return q
    block = min(4 if tokens <= FEW_TOKENS else 8, triton.next_power_of_2(heads + 2 * kv_heads))
    rest = head_dim - 2 * half
    heads_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, block))](
        qkv,
        # The kernel without a norm never reads this pointer.
        qkv if weight is None else weight,
        table,
        positions,
        slots,
        q,
        pool,
        eps,
        1 / k_scale,
        1 / v_scale,
        *pool.stride()[:4],
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        PAGE_SIZE=page_size,
        NORM=weight is not None,
        SCALED=k_scale != 1 or v_scale != 1,
        LIMIT=torch.finfo(pool.dtype).max if pool.dtype.itemsize == 1 else 0.0,
        BLOCK=block,
        num_warps=1 if tokens <= FEW_TOKENS else 2,
        **launch_options(pdl),
    )
    return q
