"""The gated delta rule token by token: decode, and tokens of prompts that fill no chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from headstock.nn.delta_rule import SMALLEST_NORM
from headstock.nn.delta_spans import CHUNK as CHUNK_TOKENS
from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, wait_for_previous
from headstock_triton.portable import log1p, round_to, sum_three

CHUNK = tl.constexpr(CHUNK_TOKENS)
SMALLEST = tl.constexpr(SMALLEST_NORM)
LINEAR = tl.constexpr(20.0)
"""From here on torch's softplus is its argument."""


@device_function
def count_tokens(starts, query_start, row, mask):
    """A row's first token, how many come before its first chunk, its chunks, and all tokens.

    row, mask, results: of one shape; int32
    """
    start = tl.load(starts + row, mask, other=0).to(tl.int32)
    first = tl.load(query_start + row, mask, other=0).to(tl.int32)
    count = tl.load(query_start + row + 1, mask, other=0).to(tl.int32) - first
    heads = tl.minimum(count, (CHUNK - start % CHUNK) % CHUNK)
    return first, heads, (count - heads) // CHUNK, count


@device_function
def load_gates(gates, token, head, VALUE_HEADS: tl.constexpr):
    """What `open_gates` takes.   gates: [tokens, 2 * VALUE_HEADS], betas and then decays"""
    line = gates + token * (2 * VALUE_HEADS) + head
    return tl.load(line + VALUE_HEADS), tl.load(line)


@device_function
def open_gates(decay, beta, rate, bias):
    """The logarithm of what memories keep at tokens, and how much of a value is written."""
    # Rounded as torch does.
    share = round_to(1.0 / (1.0 + tl.exp(-beta.to(tl.float32))), beta.dtype).to(tl.float32)
    x = decay.to(tl.float32) + bias
    softplus = tl.where(x > LINEAR, x, log1p(tl.exp(tl.minimum(x, LINEAR))))
    return -rate * softplus, share


@device_function
def scale_read(x, mean, gate, weight, eps, dtype: tl.constexpr):
    """What was read, normalized, times the weight and the gate's silu; rounded as torch does.

    x: float32 that were rounded    mean: of their squares    gate, weight: as stored
    """
    normed = round_to(x * tl.rsqrt(mean + eps), dtype).to(tl.float32)
    scaled = normed * weight.to(tl.float32)
    if weight.dtype == dtype:
        scaled = round_to(scaled, dtype).to(tl.float32)
    wide = gate.to(tl.float32)
    return round_to(scaled * (wide / (1.0 + tl.exp(-wide))), dtype)


@device_function
def load_words(line, index):
    """Eight bytes each, in which `unpack` finds numbers.   line: a pointer to numbers"""
    return tl.load(line.to(tl.pointer_type(tl.uint64)) + index)


@device_function
def unpack(words, dtype: tl.constexpr):
    """The numbers of words, in float32.   words: [..., n or 1], of which entry i takes number i"""
    size: tl.constexpr = dtype.primitive_bitwidth
    number = tl.arange(0, 64 // size).to(tl.uint64)
    bits = tl.expand_dims(words, -1) >> (number * size)
    if size == 16:
        wide = bits.to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    else:
        wide = bits.to(tl.uint32).to(dtype, bitcast=True)
    return wide


@device_function
def sum_keys(x):
    """The sum over keys.

    x: like a memory    returns: [words of values, GROUPS, values of a word]
    """
    return tl.sum(tl.sum(tl.sum(x, 4), 3), 1)


# The step's inputs are parts of one upload at any alignment. One kernel for both passes, so that
# their bits are the same.
@triton.jit(
    do_not_specialize=("after_chunks",),
    do_not_specialize_on_alignment=("pages", "starts", "query_start", "saved_pages"),
)
def learn_tokens_kernel(
    mixed,
    gates,
    rates,
    biases,
    outer_gate,
    weight,
    state,
    pages,
    starts,
    query_start,
    chunk_rows,
    saved_pages,
    out,
    eps,
    page_stride,
    after_chunks,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    SAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per value head and row, whose memory it keeps in registers.

    The first pass takes a row's tokens before its first chunk, or all if it has no chunk. The
    second one, `after_chunks`, takes those that are left of rows in `chunk_rows`.

    SAVED: the memory behind a token is also stored at its page of `saved_pages`, but for page 0.

    A memory is [words of values, lanes, GROUPS, words of keys, keys of a word, values of a word].
    Each of `GROUPS` warps has values of its own; a thread has one word of these, at some of the
    keys. So what a token learns waits for no other warp. The compiler keeps this layout, because
    loads of fewer numbers than there are threads, such as those of words, ask for no other.
    """
    begin_next(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = mixed.dtype.element_ty
    pack: tl.constexpr = 64 // dtype.primitive_bitwidth
    columns: tl.constexpr = VALUE_DIM // GROUPS // pack
    lanes: tl.constexpr = min(max(32 // columns, 1), KEY_DIM // pack)
    words: tl.constexpr = KEY_DIM // pack // lanes
    column, group, number = tl.arange(0, columns), tl.arange(0, GROUPS), tl.arange(0, pack)
    key_words = tl.arange(0, lanes)[:, None, None] + tl.arange(0, words)[None, None, :] * lanes
    value_words = group[None, :] * columns + column[:, None]
    values = value_words[:, :, None] * pack + number[None, None, :]
    own = (key_words[None, :, :, :, None, None] * pack + number[:, None]) * VALUE_DIM
    own += head * KEY_DIM * VALUE_DIM + values[:, None, :, None, None, :]
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    gain = tl.load(weight + values)
    is_early = after_chunks == 0
    first, count, chunks, total = count_tokens(starts, query_start, row, is_early)
    count = tl.where(chunks > 0, count, total)
    page = tl.load(pages + row, is_early, other=0)
    # The kernels of a layer before this pass do not write memories: they are loaded before the
    # wait. A page that another sequence had may hold NaN.
    is_there = is_early & (count > 0) & (tl.load(starts + row, is_early, other=0) > 0)
    memory = tl.load(state + page * page_stride + own, is_there, other=0.0)
    wait_for_previous(PDL)
    if after_chunks != 0:
        row = tl.load(chunk_rows + row)
        first, heads, chunks, total = count_tokens(starts, query_start, row, row >= 0)
        first += heads + CHUNK * chunks
        count = total - heads - CHUNK * chunks
        page = tl.load(pages + row, row >= 0, other=0)
        memory = tl.load(state + page * page_stride + own, count > 0, other=0.0)
    if count > 0:
        token, keys = first.to(tl.int64), tl.arange(0, KEY_DIM)
        value_column = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        gate_column = outer_gate + head * VALUE_DIM + values
        line = mixed + token * channels + key_head * KEY_DIM + keys
        all_q, all_k = tl.load(line), tl.load(line + KEY_HEADS * KEY_DIM)
        v = load_words(value_column + token * channels, value_words)
        gate = tl.load(gate_column + token * (VALUE_HEADS * VALUE_DIM))
        decay, beta = load_gates(gates, token, head, VALUE_HEADS)
        for index in range(count):
            token = first.to(tl.int64) + index
            line = mixed + token * channels + key_head * KEY_DIM
            q = load_words(line, key_words)
            k = load_words(line + KEY_HEADS * KEY_DIM, key_words)
            # What the next token needs is asked for before this one is computed. Words of its
            # query and key take too many registers, but are then in a cache.
            following = tl.minimum(token + 1, first + count - 1)
            line = mixed + following * channels + key_head * KEY_DIM + keys
            next_q, next_k = tl.load(line), tl.load(line + KEY_HEADS * KEY_DIM)
            next_v = load_words(value_column + following * channels, value_words)
            next_gate = tl.load(gate_column + following * (VALUE_HEADS * VALUE_DIM))
            next_decay, next_beta = load_gates(gates, following, head, VALUE_HEADS)

            opened, share = open_gates(decay, beta, rate, bias)
            kept = tl.exp(opened)
            wide_q, wide_k = all_q.to(tl.float32), all_k.to(tl.float32)
            squared_q, squared_k, alike = sum_three(
                wide_q * wide_q, wide_k * wide_k, wide_q * wide_k
            )
            q_length = tl.rsqrt(squared_q + SMALLEST) * (KEY_DIM**-0.5)
            k_length = tl.rsqrt(squared_k + SMALLEST)
            query = unpack(q, dtype)[None, :, :, :, :, None]
            key = unpack(k, dtype)[None, :, :, :, :, None]
            # Both sums over the memory as it was: what the token learns is added to the second.
            known = sum_keys(memory * key) * (kept * k_length)
            read = sum_keys(memory * query) * (kept * q_length)
            learned = (unpack(v, dtype) - known) * share
            read += learned * (alike * q_length * k_length)
            memory = memory * kept + key * (learned * k_length)[:, None, :, None, None, :]
            read = round_to(read, dtype).to(tl.float32)
            mean = tl.sum(tl.sum(tl.sum(read * read, 2), 1), 0) / VALUE_DIM
            result = scale_read(read, mean, gate, gain, eps, dtype)
            tl.store(out + (token * VALUE_HEADS + head) * VALUE_DIM + values, result)
            if SAVED:
                target = tl.load(saved_pages + token)
                tl.store(state + target * page_stride + own, memory, target > 0)

            all_q, all_k, v, gate = next_q, next_k, next_v, next_gate
            decay, beta = next_decay, next_beta
        tl.store(state + page * page_stride + own, memory)
