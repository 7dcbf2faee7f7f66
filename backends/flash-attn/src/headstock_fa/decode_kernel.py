"""Attention of decode rows: a row's keys are split among programs, and merged in place.

Library kernels for decode need several launches and microseconds before their first load, and read
short rows at half the memory speed. Here a program is one KV head of one row and a part of its
keys. The last program of a row to finish merges the parts, so that one launch is enough.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import LayerInfo
from headstock_fa.decode_merge import LN_2, merge_parts
from headstock_fa.decode_tile import DecodeTile
from headstock_fa.pdl import INTERPRETED, begin_next, wait_for_previous

LOG2_E = tl.constexpr(math.log2(math.e))
MERGED_NUMBERS = 8192
"""Float32 numbers of parts that a program merges at once: 64 registers per thread of four warps."""


@frozen(kw_only=True, eq=False)
class PartialSums:
    """The partial results of the programs of a row; no two launches use it at once.

    sums: float32, [rows, kv_heads, splits, group, head_dim] in a launch, not yet divided
    levels: float32, [2, rows, kv_heads, splits, group]: the highest score and the sum of weights
    counters: [rows * kv_heads] int32, the number of finished programs; 0 between launches
    """

    sums: Tensor
    levels: Tensor
    counters: Tensor

    @classmethod
    def new(
        cls,
        *,
        rows: int,
        parts: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> PartialSums:
        """Room for launches of up to `rows` rows, and `parts`: rows times splits."""
        return cls(
            sums=torch.empty(parts * heads * head_dim, device=device),
            levels=torch.empty(2 * parts * heads, device=device),
            counters=torch.zeros(rows * kv_heads, dtype=torch.int32, device=device),
        )

    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return self.sums.nbytes + self.levels.nbytes + self.counters.nbytes


@triton.jit
def _cap(scores, SOFTCAP: tl.constexpr):
    """The soft cap times tanh(scores / soft cap), by an exponential that cannot overflow."""
    e = tl.exp(-tl.abs(scores) * (2.0 / SOFTCAP))
    capped = SOFTCAP * (1.0 - e) / (1.0 + e)
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def _multiply(lhs, rhs):
    """lhs @ rhs in float32; the interpreter treats bfloat16 as integers there."""
    if INTERPRETED:
        return tl.dot(lhs.to(tl.float32), rhs.to(tl.float32))
    return tl.dot(lhs, rhs)


@triton.jit
def _scores(q, k, scale, SOFTCAP: tl.constexpr):
    """Scores in units of ln 2.   q: [group, dim]    k: [tokens, dim]    returns: [group, tokens]"""
    s = _multiply(q, tl.trans(k))
    s = s * scale
    if SOFTCAP > 0:
        s = _cap(s, SOFTCAP)
    return s * LOG2_E


@triton.jit
def _add_block(q, k, v, seen, peak, mass, sums, scale, SOFTCAP: tl.constexpr):
    """The running highest score, sum of weights and weighted values, updated by one block."""
    s = tl.where(seen[None, :], _scores(q, k, scale, SOFTCAP), -float("inf"))
    higher = tl.maximum(peak, tl.max(s, 1))
    # A program without the row's own token starts at minus infinity; an empty block must not turn
    # that into NaN.
    level = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s - level[:, None])
    shrink = tl.exp2(peak - level)
    added = _multiply(p.to(v.dtype), v)
    return higher, mass * shrink + tl.sum(p, 1), sums * shrink[:, None] + added


@triton.jit
def _locate(
    table, start, n, seen, page_stride, slot_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    """Addresses of the keys of the tokens `n`, a block from `start`, which is a multiple of
    BLOCK."""
    if PAGE % BLOCK == 0:
        # One page for the block, whose first token the row has.
        page = tl.load(table + start // PAGE).to(tl.int64)
    else:
        page = tl.load(table + n // PAGE, seen, other=0).to(tl.int64)
    return page * page_stride + (n % PAGE) * slot_stride


@triton.jit
def _load_block(
    keys,
    values,
    pages,
    start,
    stop,
    inside,
    in_head,
    page_stride,
    slot_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and values of the tokens from `start` to `stop`, and their mask in the block."""
    n = start + tl.arange(0, BLOCK)
    seen = n < stop
    at = _locate(pages, start, n, seen, page_stride, slot_stride, PAGE, BLOCK)[:, None] + inside
    there = seen[:, None] & in_head[None, :]
    k = tl.load(keys + at, there, other=0.0)
    v = tl.load(values + at, there, other=0.0)
    return k, v, seen


# The number of columns of a table changes between steps, and its rows have any alignment.
@triton.jit(
    do_not_specialize=("columns", "least_blocks"),
    do_not_specialize_on_alignment=("lens", "table"),
)
def decode_kernel(
    q,
    keys,
    values,
    lens,
    table,
    out,
    lse,
    part_sums,
    part_levels,
    counters,
    scale,
    columns,
    least_blocks,
    page_stride,
    slot_stride,
    head_stride,
    q_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
    MERGED_GROUP: tl.constexpr,
    LSE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One KV head of one row, and a part of the row's keys."""
    begin_next(PDL)
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(lens + row)
    # The last token is the row's own, whose key an earlier kernel of this step has written.
    past = length - 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    begin = first // BLOCK
    blocks = tl.maximum(tl.cdiv(past, BLOCK) - begin, 0)
    share = tl.maximum(tl.cdiv(blocks, SPLITS), least_blocks)
    used = tl.maximum(tl.cdiv(blocks, share), 1)
    group, d = tl.arange(0, GROUP), tl.arange(0, DIM)
    in_head = d < HEAD_DIM
    if split < used:
        start = (begin + split * share) * BLOCK
        stop = tl.minimum(past, start + share * BLOCK)
        pages = table + row * columns
        inside = kv_head * head_stride + d[None, :]
        # Data past the row's tokens may be anything, even NaN: it is never read.
        k, v, seen = _load_block(
            keys, values, pages, start, stop, inside, in_head, page_stride, slot_stride, PAGE, BLOCK
        )
        seen = seen & (start + tl.arange(0, BLOCK) >= first)
        own_page = tl.load(pages + past // PAGE).to(tl.int64)
        # So far, no data written by kernels of this step was read, except the tables, which the
        # first kernels of the step write before the embedding look-up.
        wait_for_previous(PDL)
        head = kv_head * heads + group
        there = (group < heads)[:, None] & in_head[None, :]
        x = tl.load(q + row * q_stride + head[:, None] * HEAD_DIM + d[None, :], there, other=0.0)
        # The first program begins with the row's own token, the others with nothing.
        own = own_page * page_stride + (past % PAGE) * slot_stride + kv_head * head_stride + d
        mine = in_head & (split == 0)
        own_key = tl.load(keys + own, mine, other=0.0).to(tl.float32)
        own_value = tl.load(values + own, mine, other=0.0).to(tl.float32)
        own_score = tl.sum(x.to(tl.float32) * own_key[None, :], 1) * scale
        if SOFTCAP > 0:
            own_score = _cap(own_score, SOFTCAP)
        peak = tl.where(split == 0, own_score * LOG2_E, -float("inf"))
        mass = tl.where(split == 0, 1.0, 0.0) + tl.zeros((GROUP,), tl.float32)
        sums = own_value[None, :] + tl.zeros((GROUP, DIM), tl.float32)
        peak, mass, sums = _add_block(x, k, v, seen, peak, mass, sums, scale, SOFTCAP)
        if INTERPRETED:
            # The interpreter does not support a range up to a number on the device.
            place = start + BLOCK
            while place < stop:
                k, v, seen = _load_block(
                    keys, values, pages, place, stop, inside, in_head, page_stride, slot_stride,
                    PAGE, BLOCK,
                )  # fmt: skip
                peak, mass, sums = _add_block(x, k, v, seen, peak, mass, sums, scale, SOFTCAP)
                place += BLOCK
        else:
            for later in tl.range(start + BLOCK, stop, BLOCK, num_stages=STAGES):
                k, v, seen = _load_block(
                    keys, values, pages, later, stop, inside, in_head, page_stride, slot_stride,
                    PAGE, BLOCK,
                )  # fmt: skip
                peak, mass, sums = _add_block(x, k, v, seen, peak, mass, sums, scale, SOFTCAP)
        answer = out + row * HEADS * HEAD_DIM + kv_head * heads * HEAD_DIM
        if used == 1:
            there = (group < heads)[:, None] & in_head[None, :]
            at = group[:, None] * HEAD_DIM + d[None, :]
            tl.store(answer + at, (sums / mass[:, None]).to(out.dtype.element_ty), there)
            if LSE:
                tl.store(lse + row * HEADS + head, (peak + tl.log2(mass)) * LN_2, group < heads)
        else:
            pair = row * KV_HEADS + kv_head
            place = (pair * SPLITS + split) * heads + group
            levels = tl.num_programs(2) * KV_HEADS * SPLITS * heads
            tl.store(part_levels + place, peak, group < heads)
            tl.store(part_levels + levels + place, mass, group < heads)
            there = (group < heads)[:, None] & in_head[None, :]
            tl.store(part_sums + place[:, None] * HEAD_DIM + d[None, :], sums, there)
            # All threads must have stored before one of them signals it.
            tl.debug_barrier()
            ended = tl.atomic_add(counters + pair, 1, sem="acq_rel", scope="gpu")
            if ended == used - 1:
                # For the next launch, which waits for this one.
                tl.store(counters + pair, 0)
                merge_parts(
                    part_sums,
                    part_levels,
                    part_levels + levels,
                    pair * SPLITS,
                    used,
                    answer,
                    lse + row * HEADS + kv_head * heads,
                    heads,
                    HEAD_DIM,
                    DIM,
                    SPLITS,
                    MERGED,
                    MERGED_GROUP,
                    LSE,
                )


def attend_decode_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lens: Tensor,
    table: Tensor,
    layer: LayerInfo,
    out: Tensor,
    lse: Tensor | None,
    parts: PartialSums,
    *,
    tile: DecodeTile,
    pdl: bool = False,
) -> None:
    """Attention of one query per row over the row's pages.

    q: [rows, heads, head_dim]    keys, values: [pages, page_size, kv_heads, head_dim], views alike
    lens: [rows] int32, at least 1    table: [rows, columns] int32
    pdl: begin while the previous kernel still runs, and read lengths, tables and the keys of
        earlier tokens before waiting for it: these must be older
    writes: out [rows, heads, head_dim]; lse [rows, heads] float32, natural logarithm; parts
    """
    (rows, heads, head_dim), kv_heads = q.shape, keys.shape[2]
    group, dim = heads // kv_heads, triton.next_power_of_2(head_dim)
    merged_group = triton.next_power_of_2(group)
    # Triton's interpreter runs kernels one after another and supports neither the option nor the
    # instruction.
    pdl = pdl and not INTERPRETED
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    decode_kernel[(tile.splits, kv_heads, rows)](
        q,
        keys,
        values,
        lens,
        table,
        out,
        out if lse is None else lse,
        parts.sums,
        parts.levels,
        parts.counters,
        layer.scale,
        table.stride(0),
        -(-tile.least_tokens // tile.tokens),
        *keys.stride()[:3],
        q.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        # Tensor cores take 16 queries at a time.
        GROUP=max(merged_group, 16),
        HEAD_DIM=head_dim,
        DIM=dim,
        PAGE=keys.shape[1],
        WINDOW=layer.window or 0,
        SOFTCAP=layer.softcap,
        SPLITS=tile.splits,
        BLOCK=tile.tokens,
        MERGED=min(max(MERGED_NUMBERS // (merged_group * dim), 1), tile.splits),
        MERGED_GROUP=merged_group,
        LSE=lse is not None,
        STAGES=tile.stages,
        PDL=pdl,
        num_warps=tile.warps,
        **options,
    )
