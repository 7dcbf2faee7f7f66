"""The gated delta rule chunk by chunk: what depends on a chunk alone, then memories from one to the
next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headstock_triton.delta_tokens import (
    CHUNK,
    SMALLEST,
    count_tokens,
    load_gates,
    open_gates,
    scale_read,
)
from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, wait_for_previous
from headstock_triton.portable import multiply, round_to

PART = tl.constexpr(16)
"""Rows of the parts in which a chunk's matrix is inverted."""


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("starts", "query_start"))
def list_chunks_kernel(
    starts, query_start, chunk_tokens, chunk_rows, rows, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """One program per entry, of which a step has as many as its tokens could fill chunks.

    writes: chunk_tokens, the first token of the entry's chunk; chunk_rows, the entry's row among
        those with chunks; -1 for entries that a step does not fill
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    entry, row = tl.program_id(0), tl.arange(0, ROWS)
    first, heads, chunks, _ = count_tokens(starts, query_start, row, row < rows)
    ends = tl.cumsum(chunks, 0)
    is_own = (ends > entry) & (ends - chunks <= entry)
    token = tl.sum(tl.where(is_own, first + heads + CHUNK * (entry - ends + chunks), 0), 0)
    is_there = tl.sum(is_own.to(tl.int32), 0) > 0
    tl.store(chunk_tokens + entry, tl.where(is_there, token, -1))
    has_chunks = (chunks > 0).to(tl.int32)
    is_own = (tl.cumsum(has_chunks, 0) == entry + 1) & (chunks > 0)
    found = tl.sum(tl.where(is_own, row + 1, 0), 0)
    tl.store(chunk_rows + entry, found - 1)


@device_function
def invert(matrix):
    """(1 + matrix)^-1.   matrix: [CHUNK, CHUNK] float32, 0 on its diagonal and above it"""
    parts: tl.constexpr = CHUNK // PART
    part, at = tl.arange(0, parts), tl.arange(0, PART)
    is_own = part[:, None, None, None] == part[None, None, :, None]
    split = tl.reshape(matrix, (parts, PART, parts, PART))
    own = tl.sum(tl.where(is_own, split, 0.0), 2)
    # The parts on the diagonal by elimination, column after column: [parts, PART, PART].
    inverse = tl.where(at[None, :, None] == at[None, None, :], 1.0, tl.zeros_like(own))
    for column in tl.static_range(PART - 1):
        factors = tl.sum(tl.where(at[None, None, :] == column, own, 0.0), 2)
        line = tl.sum(tl.where(at[None, :, None] == column, inverse, 0.0), 1)
        inverse -= factors[:, :, None] * line[:, None, :]
    inner = tl.where(is_own, inverse[:, :, None, :], 0.0)
    inner = tl.reshape(inner, (CHUNK, CHUNK))
    rows = tl.arange(0, CHUNK)
    is_outer = (rows[:, None] // PART) != (rows[None, :] // PART)
    # 1 + matrix = (1 + outer) times the parts on the diagonal, of which the inverse is `inner`.
    # Four parts, so that outer^4 = 0 and (1 + outer)^-1 = (1 - outer) (1 + outer^2).
    outer = multiply(inner, tl.where(is_outer, matrix, 0.0))
    total = inner + multiply(multiply(outer, outer), inner)
    return total - multiply(outer, total)


# How many tokens a step has must not choose a kernel, whose bits might be others.
@triton.jit(do_not_specialize=("tokens",))
def prepare_chunks_kernel(
    mixed,
    gates,
    rates,
    biases,
    chunk_tokens,
    updates,
    shares,
    factors,
    tokens,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per value head and chunk: all that depends on no memory.

    Vectors of queries and keys are multiplied as they are, and their lengths afterwards: products
    of 16 bits are exact.

    writes: updates [VALUE_HEADS, tokens, CHUNK], which times what is new in values is learned;
        shares, alike, of what is learned in what queries read;
        factors [4, VALUE_HEADS, tokens], of what keys and queries read from the chunk's memory, of
        keys at the chunk's end, and of the memory
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    head, first = tl.program_id(0), tl.load(chunk_tokens + tl.program_id(1)).to(tl.int64)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    if first >= 0:
        at, keys = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
        token = first + at
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        line = mixed + token[:, None] * channels + key_head * KEY_DIM + keys[None, :]
        q, k = tl.load(line), tl.load(line + KEY_HEADS * KEY_DIM)
        wide = q.to(tl.float32)
        q_length = tl.rsqrt(tl.sum(wide * wide, 1) + SMALLEST) * (KEY_DIM**-0.5)
        wide = k.to(tl.float32)
        k_length = tl.rsqrt(tl.sum(wide * wide, 1) + SMALLEST)
        rate, bias = tl.load(rates + head), tl.load(biases + head)
        decay, beta = load_gates(gates, token, head, VALUE_HEADS)
        decay, beta = open_gates(decay, beta, rate, bias)
        total = tl.cumsum(decay, 0)

        # Masked before the exponential, which would overflow for tokens that come later.
        is_before = at[:, None] >= at[None, :]
        since = tl.where(is_before, total[:, None] - total[None, :], float("-inf"))
        kept = tl.exp(since) * k_length[None, :]
        alike = multiply(k, tl.trans(k)) * kept * (k_length * beta)[:, None]
        inverse = invert(tl.where(at[:, None] > at[None, :], alike, 0.0))
        square = head.to(tl.int64) * tokens * CHUNK + token[:, None] * CHUNK + at[None, :]
        dtype: tl.constexpr = updates.dtype.element_ty
        tl.store(updates + square, round_to(inverse * beta[None, :], dtype))
        share = multiply(q, tl.trans(k)) * kept * q_length[:, None]
        tl.store(shares + square, round_to(share, dtype))

        line = factors + head * tokens + token
        side = VALUE_HEADS * tokens
        grown, last = tl.exp(total), tl.sum(decay, 0)
        tl.store(line, grown * k_length)
        tl.store(line + side, grown * q_length)
        tl.store(line + 2 * side, tl.exp(last - total) * k_length)
        tl.store(line + 3 * side, grown)


@triton.jit(
    do_not_specialize=("tokens",),
    do_not_specialize_on_alignment=("pages", "starts", "query_start", "saved_pages"),
)
def learn_chunks_kernel(
    mixed,
    updates,
    shares,
    factors,
    state,
    pages,
    starts,
    query_start,
    chunk_rows,
    saved_pages,
    out,
    tokens,
    page_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per `BLOCK` values of a head and row with chunks, which goes through these.

    SAVED: the memory behind a chunk is also stored at the page of its last token in `saved_pages`,
    but for page 0.

    writes: out [tokens, VALUE_HEADS, VALUE_DIM], what queries read; state
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    blocks: tl.constexpr = VALUE_DIM // BLOCK
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    row = tl.load(chunk_rows + tl.program_id(1))
    if row >= 0:
        first, heads, chunks, _ = count_tokens(starts, query_start, row, row >= 0)
        at, keys = tl.arange(0, CHUNK), tl.arange(0, KEY_DIM)
        values = head * VALUE_DIM + block * BLOCK + tl.arange(0, BLOCK)
        dtype: tl.constexpr = mixed.dtype.element_ty
        own = head * (KEY_DIM * VALUE_DIM) + block * BLOCK + tl.arange(0, BLOCK)[None, :]
        place = state + tl.load(pages + row) * page_stride + own + keys[:, None] * VALUE_DIM
        # A page that another sequence had may hold NaN. A row that begins has no tokens before
        # its first chunk.
        is_there = tl.load(starts + row) > 0
        memory = tl.load(place, is_there, other=0.0)
        key_head, side = head // (VALUE_HEADS // KEY_HEADS), VALUE_HEADS * tokens
        square = head.to(tl.int64) * tokens * CHUNK
        for chunk in tl.range(0, chunks, num_stages=STAGES):
            start = (first + heads + CHUNK * chunk).to(tl.int64)
            token = start + at
            line = mixed + token[:, None] * channels
            q = tl.load(line + key_head * KEY_DIM + keys[None, :])
            k = tl.load(line + (KEY_HEADS + key_head) * KEY_DIM + keys[None, :])
            v = tl.load(line + 2 * KEY_HEADS * KEY_DIM + values[None, :])
            places = square + token[:, None] * CHUNK + at[None, :]
            update, share = tl.load(updates + places), tl.load(shares + places)
            factor = factors + head * tokens + token
            for_keys, for_queries = tl.load(factor), tl.load(factor + side)
            at_end = tl.load(factor + 2 * side)
            kept = tl.load(factors + 3 * side + head * tokens + start + (CHUNK - 1))

            known = round_to(memory, dtype)
            new = v.to(tl.float32) - multiply(k, known) * for_keys[:, None]
            learned = multiply(update, round_to(new, dtype))
            read = multiply(q, known) * for_queries[:, None]
            read += multiply(share, round_to(learned, dtype))
            tl.store(
                out + token[:, None] * (VALUE_HEADS * VALUE_DIM) + values[None, :],
                round_to(read, dtype),
            )
            left = round_to(learned * at_end[:, None], dtype)
            memory = memory * kept + multiply(tl.trans(k), left)
            if SAVED:
                target = tl.load(saved_pages + start + (CHUNK - 1))
                to = state + target * page_stride + own + keys[:, None] * VALUE_DIM
                tl.store(to, memory, target > 0)
        tl.store(place, memory)


@triton.jit
def normalize_chunks_kernel(
    out,
    outer_gate,
    weight,
    chunk_tokens,
    eps,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per value head and chunk.   writes: out, in place of what queries read"""
    begin_next(PDL)
    head, at, values = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, VALUE_DIM)
    gain = tl.load(weight + values)[None, :]
    wait_for_previous(PDL)
    first = tl.load(chunk_tokens + tl.program_id(1)).to(tl.int64)
    if first >= 0:
        line = ((first + at)[:, None] * VALUE_HEADS + head) * VALUE_DIM + values[None, :]
        read = tl.load(out + line).to(tl.float32)
        gate = tl.load(outer_gate + line)
        mean = tl.sum(read * read, 1, keep_dims=True) / VALUE_DIM
        tl.store(out + line, scale_read(read, mean, gate, gain, eps, out.dtype.element_ty))
