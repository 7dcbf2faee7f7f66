"""Paged attention in one kernel: rows of any length, whose keys are read in one part or in several.

A program has some queries of a row, some query heads of one KV head, and one part of the keys that
these see. Which row that is follows from `query_start` on the device, so a launch depends on the
numbers of tokens and rows alone.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _find_row(query_start, rows, block, QUERIES: tl.constexpr):
    """The row of a block of queries, and the row's first block.

    The blocks of row r begin at `query_start[r] // QUERIES + r`, which leaves room for the
    incomplete last block of each row before it.
    """
    low = tl.zeros((), tl.int32)
    high = low + rows
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(query_start + middle) // QUERIES + middle
        low = tl.where(begins <= block, middle, low)
        high = tl.where(begins <= block, high, middle)
    return low, tl.load(query_start + low) // QUERIES + low


@triton.jit
def _locate_block(query_start, lens, rows, block, QUERIES: tl.constexpr, DECODE: tl.constexpr):
    """The row of a block, the first of its tokens in the step, their number, and the position of
    the first.

    The number is 0 or less where the block has none.
    """
    if DECODE:
        row, token, count = block, block, 1
        position = tl.load(lens + row) - 1
    else:
        row, first = _find_row(query_start, rows, block, QUERIES)
        begin, end = tl.load(query_start + row), tl.load(query_start + row + 1)
        token = begin + (block - first) * QUERIES
        count = tl.minimum(end - token, QUERIES)
        position = tl.load(lens + row) - (end - token)
    return row, token, count, position


@triton.jit
def _share_out(
    position, count, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Which keys the queries from `position` on see, and how these are split.

    returns: the first key, the key after the last, the first block of keys, the blocks of a part,
        the number of parts
    """
    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
    high = position + count
    begin = low // BLOCK
    blocks = tl.cdiv(high, BLOCK) - begin
    share = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST)
    return low, high, begin, share, tl.cdiv(blocks, share)


@triton.jit
def _multiply(lhs, rhs):
    """lhs @ rhs in float32; the interpreter treats bfloat16 as integers there."""
    if INTERPRETED:
        lhs, rhs = lhs.to(tl.float32), rhs.to(tl.float32)
    return tl.dot(lhs, rhs, input_precision="ieee")


@triton.jit
def _cap(scores, SOFTCAP: tl.constexpr):
    """The soft cap times tanh(scores / soft cap), by an exponential that cannot overflow."""
    e = tl.exp(-tl.abs(scores) * (2.0 / SOFTCAP))
    capped = SOFTCAP * (1.0 - e) / (1.0 + e)
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def _add_block(
    x, keys, values, pages, start, low, stop, at, peak, mass, sums, scale, inside,
    page_stride, slot_stride, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The running highest score, sum of weights and weighted values, with the keys from `start`."""
    n, d = start + tl.arange(0, BLOCK), tl.arange(0, DIM)
    owned = (n >= low) & (n < stop)
    if PAGE % BLOCK == 0:
        # One page has the whole block, as blocks begin at multiples of BLOCK.
        page = tl.load(pages + start // PAGE).to(tl.int64)
    else:
        page = tl.load(pages + n // PAGE, owned, other=0).to(tl.int64)
    # A region may be a page of more than 2**31 numbers.
    place = page * page_stride + (n % PAGE).to(tl.int64) * slot_stride + inside
    # What is not the row's may be anything, even NaN: it is never read.
    there = owned[:, None]
    if HEAD_DIM < DIM:
        there = there & (d < HEAD_DIM)[None, :]
    k = tl.load(keys + place[:, None] + d[None, :], there, other=0.0).to(x.dtype)
    v = tl.load(values + place[:, None] + d[None, :], there, other=0.0).to(x.dtype)

    s = _multiply(x, tl.trans(k)) * scale
    if SOFTCAP > 0:
        s = _cap(s, SOFTCAP)
    s = s * LOG2_E
    # `at` is the last key that a query sees.
    seen = (n[None, :] <= at[:, None]) & (n < stop)[None, :]
    if WINDOW > 0:
        seen = seen & (n[None, :] > at[:, None] - WINDOW)
    s = tl.where(seen, s, -float("inf"))
    higher = tl.maximum(peak, tl.max(s, 1))
    # A query that sees nothing yet is at minus infinity, which must not become NaN.
    level = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s - level[:, None])
    shrink = tl.exp2(peak - level)
    mass = mass * shrink + tl.sum(p, 1)
    return higher, mass, sums * shrink[:, None] + _multiply(p.to(x.dtype), v)


@triton.jit
def _normalize(peak, mass, sums, sink, SINKS: tl.constexpr):
    """The weighted values by the sum of weights, that of the sink included.

    sums: with the queries along the first axis
    """
    if SINKS:
        further = sink * LOG2_E
        level = tl.maximum(peak, further)
        weight = tl.exp2(peak - level)
        sums = sums * weight[:, None]
        mass = mass * weight + tl.exp2(further - level)
    return sums / mass[:, None]


# The columns of a table change between steps, and its rows have any alignment.
@triton.jit(
    do_not_specialize=("first_block", "rows", "columns"),
    do_not_specialize_on_alignment=("query_start", "lens", "table"),
)
def attend_kernel(
    q,
    keys,
    values,
    query_start,
    lens,
    table,
    sinks,
    out,
    lse,
    part_sums,
    part_levels,
    scale,
    v_scale,
    first_block,
    rows,
    columns,
    page_stride,
    slot_stride,
    head_stride,
    q_token,
    q_head,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    DECODE: tl.constexpr,
    LSE: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """QUERIES queries of a row by GROUP of the RATIO heads of a KV head, WIDTH with padding."""
    # Late blocks of a prompt see the most keys, so they begin first.
    local = tl.num_programs(0) - 1 - tl.program_id(0)
    pair, split = tl.program_id(1), tl.program_id(2)
    row, token, count, position = _locate_block(
        query_start, lens, rows, first_block + local, QUERIES, DECODE
    )
    low, high, begin, share, used = _share_out(position, count, WINDOW, SPLITS, LEAST, BLOCK)
    if (count > 0) & (split < used):
        member, d = tl.arange(0, WIDTH), tl.arange(0, DIM)
        parts: tl.constexpr = (RATIO + GROUP - 1) // GROUP
        kv_head = pair // parts
        query, in_group = member // GROUP, (pair % parts) * GROUP + member % GROUP
        is_real = (query < count) & (in_group < RATIO)
        head = kv_head * RATIO + in_group
        there = is_real[:, None]
        if HEAD_DIM < DIM:
            there = there & (d < HEAD_DIM)[None, :]
        own = (token + query).to(tl.int64)
        x = tl.load(q + (own * q_token + head * q_head)[:, None] + d[None, :], there, other=0.0)
        start = (begin + split * share) * BLOCK
        stop = tl.minimum(high, start + share * BLOCK)
        pages = table + row.to(tl.int64) * columns
        inside = kv_head * head_stride
        peak = tl.full((WIDTH,), -float("inf"), tl.float32)
        mass = tl.zeros((WIDTH,), tl.float32)
        sums = tl.zeros((WIDTH, DIM), tl.float32)
        at = position + query
        if INTERPRETED:
            # The interpreter does not support a range up to a number on the device.
            place = start
            while place < stop:
                peak, mass, sums = _add_block(
                    x, keys, values, pages, place, low, stop, at, peak, mass, sums, scale, inside,
                    page_stride, slot_stride, HEAD_DIM, DIM, PAGE, WINDOW, SOFTCAP, BLOCK,
                )  # fmt: skip
                place += BLOCK
        else:
            for place in tl.range(start, stop, BLOCK, num_stages=STAGES):
                peak, mass, sums = _add_block(
                    x, keys, values, pages, place, low, stop, at, peak, mass, sums, scale, inside,
                    page_stride, slot_stride, HEAD_DIM, DIM, PAGE, WINDOW, SOFTCAP, BLOCK,
                )  # fmt: skip
        if used == 1:
            mass = tl.where(is_real, mass, 1.0)
            sink = peak
            if SINKS:
                sink = tl.load(sinks + head, is_real, other=0.0)
            answer = _normalize(peak, mass, sums, sink, SINKS) * v_scale
            tl.store(
                out + (own * out_token + head * out_head)[:, None] + d[None, :],
                answer.to(out.dtype.element_ty),
                there,
            )
            if LSE:
                tl.store(lse + own * HEADS + head, (peak + tl.log2(mass)) * LN_2, is_real)
        else:
            # QUERIES * GROUP members are real in the block of the most.
            most: tl.constexpr = QUERIES * GROUP
            part = (local * tl.num_programs(1) + pair) * SPLITS + split
            slot = part.to(tl.int64) * most + member
            tl.store(part_sums + slot[:, None] * HEAD_DIM + d[None, :], sums, there)
            tl.store(part_levels + 2 * slot, peak, is_real)
            tl.store(part_levels + 2 * slot + 1, mass, is_real)


@triton.jit(
    do_not_specialize=("first_block", "rows"),
    do_not_specialize_on_alignment=("query_start", "lens"),
)
def merge_kernel(
    query_start,
    lens,
    sinks,
    out,
    lse,
    part_sums,
    part_levels,
    v_scale,
    first_block,
    rows,
    out_token,
    out_head,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    DECODE: tl.constexpr,
    LSE: tl.constexpr,
    SINKS: tl.constexpr,
    MERGED: tl.constexpr,
    SOME: tl.constexpr,
):
    """SOME numbers of one query and head, from the parts of its keys, MERGED at a time in order.

    What one part has served is written already.
    """
    local, pair = tl.program_id(0), tl.program_id(1)
    chunks: tl.constexpr = DIM // SOME
    member, chunk = tl.program_id(2) // chunks, tl.program_id(2) % chunks
    _, token, count, position = _locate_block(
        query_start, lens, rows, first_block + local, QUERIES, DECODE
    )
    _, _, _, _, used = _share_out(position, count, WINDOW, SPLITS, LEAST, BLOCK)
    parts: tl.constexpr = (RATIO + GROUP - 1) // GROUP
    query, in_group = member // GROUP, (pair % parts) * GROUP + member % GROUP
    if (query < count) & (in_group < RATIO) & (used > 1):
        head = (pair // parts) * RATIO + in_group
        d, split = chunk * SOME + tl.arange(0, SOME), tl.arange(0, SPLITS)
        most: tl.constexpr = QUERIES * GROUP
        first = (local * tl.num_programs(1) + pair).to(tl.int64) * SPLITS * most + member
        levels = part_levels + 2 * (first + split * most)
        peaks = tl.load(levels, split < used, other=-float("inf"))
        masses = tl.load(levels + 1, split < used, other=0.0)
        peak = tl.max(peaks, 0)
        mass = tl.sum(masses * tl.exp2(peaks - peak), 0)
        sums = tl.zeros((SOME,), tl.float32)
        begin = tl.zeros((), tl.int32)
        while begin < used:
            some = begin + tl.arange(0, MERGED)
            slots = first + some * most
            highest = tl.load(part_levels + 2 * slots, some < used, other=-float("inf"))
            there = (some < used)[:, None] & (d < HEAD_DIM)[None, :]
            held = tl.load(part_sums + slots[:, None] * HEAD_DIM + d[None, :], there, other=0.0)
            sums += tl.sum(held * tl.exp2(highest - peak)[:, None], 0)
            begin += MERGED
        sink = tl.zeros((1,), tl.float32)
        if SINKS:
            sink = sink + tl.load(sinks + head)
        peak, mass = tl.zeros((1,), tl.float32) + peak, tl.zeros((1,), tl.float32) + mass
        answer = _normalize(peak, mass, sums[None, :], sink, SINKS) * v_scale
        own = token.to(tl.int64) + query
        one = tl.arange(0, 1)
        tl.store(
            out + own * out_token + head * out_head + one[:, None] + d[None, :],
            answer.to(out.dtype.element_ty),
            (d < HEAD_DIM)[None, :],
        )
        if LSE:
            there = (one == 0) & (chunk == 0)
            tl.store(lse + own * HEADS + head + one, (peak + tl.log2(mass)) * LN_2, there)
