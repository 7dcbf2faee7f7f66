"""The gated delta rule token by token: decode, and tokens of prompts that fill no chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from headstock.nn.delta_rule import SMALLEST_NORM
from headstock.nn.delta_spans import CHUNK as CHUNK_TOKENS
from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, wait_for_previous
from headstock_triton.portable import log1p, round_to

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
def load_gates(gates, rate, bias, token, head, VALUE_HEADS: tl.constexpr):
    """The logarithm of what memories keep at tokens, and how much of a value is written.

    gates: [tokens, 2 * VALUE_HEADS], betas and then decays    rate, bias: the head's
    """
    line = gates + token * (2 * VALUE_HEADS) + head
    beta = tl.load(line)
    # Rounded as torch does.
    beta = round_to(1.0 / (1.0 + tl.exp(-beta.to(tl.float32))), beta.dtype).to(tl.float32)
    x = tl.load(line + VALUE_HEADS).to(tl.float32) + bias
    softplus = tl.where(x > LINEAR, x, log1p(tl.exp(tl.minimum(x, LINEAR))))
    return -rate * softplus, beta


@device_function
def normalize_read(x, gate, weight, eps, dtype: tl.constexpr):
    """What was read, normalized over the last dimension, times the weight and the gate's silu.

    x: [..., value_dim] float32    gate, weight: as stored; every step is rounded as torch does
    """
    x = round_to(x, dtype).to(tl.float32)
    axis: tl.constexpr = len(x.shape) - 1
    mean = tl.sum(x * x, axis, keep_dims=True) / x.shape[axis]
    normed = round_to(x * tl.rsqrt(mean + eps), dtype).to(tl.float32)
    scaled = normed * weight.to(tl.float32)
    if weight.dtype == dtype:
        scaled = round_to(scaled, dtype).to(tl.float32)
    wide = gate.to(tl.float32)
    return round_to(scaled * (wide / (1.0 + tl.exp(-wide))), dtype)


# The step's inputs are parts of one upload at any alignment. One kernel for both passes, so that
# their bits are the same.
@triton.jit(
    do_not_specialize=("after_chunks",),
    do_not_specialize_on_alignment=("pages", "starts", "query_start"),
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
    out,
    eps,
    page_stride,
    after_chunks,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per value head and row, whose memory it keeps in registers.

    The first pass takes a row's tokens before its first chunk, or all if it has no chunk. The
    second one, `after_chunks`, takes those that are left of rows in `chunk_rows`.
    """
    begin_next(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    keys, values = tl.arange(0, KEY_DIM), tl.arange(0, VALUE_DIM)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    own = head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + values[None, :]
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
        token = first.to(tl.int64)
        line = mixed + token * channels + key_head * KEY_DIM
        q = tl.load(line + keys)
        k = tl.load(line + KEY_HEADS * KEY_DIM + keys)
        column = mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
        v = tl.load(column + token * channels)
        gate_column = outer_gate + head * VALUE_DIM + values
        gate = tl.load(gate_column + token * (VALUE_HEADS * VALUE_DIM))
        decay, beta = load_gates(gates, rate, bias, token, head, VALUE_HEADS)
        for index in range(count):
            # What the next token needs is asked for before this one is computed.
            token = first.to(tl.int64) + index
            following = tl.minimum(token + 1, first + count - 1)
            line = mixed + following * channels + key_head * KEY_DIM
            next_q = tl.load(line + keys)
            next_k = tl.load(line + KEY_HEADS * KEY_DIM + keys)
            next_v = tl.load(column + following * channels)
            next_gate = tl.load(gate_column + following * (VALUE_HEADS * VALUE_DIM))
            next_decay, next_beta = load_gates(gates, rate, bias, following, head, VALUE_HEADS)

            query, key = q.to(tl.float32), k.to(tl.float32)
            query *= tl.rsqrt(tl.sum(query * query, 0) + SMALLEST) * (KEY_DIM**-0.5)
            key *= tl.rsqrt(tl.sum(key * key, 0) + SMALLEST)
            kept = tl.exp(decay)
            # Both sums over the memory as it was: what the token learns is added to the second.
            known = kept * tl.sum(memory * key[:, None], 0)
            read = kept * tl.sum(memory * query[:, None], 0)
            learned = (v.to(tl.float32) - known) * beta
            read += tl.sum(query * key, 0) * learned
            memory = memory * kept + key[:, None] * learned[None, :]
            result = normalize_read(read, gate, gain, eps, out.dtype.element_ty)
            tl.store(out + (token * VALUE_HEADS + head) * VALUE_DIM + values, result)

            q, k, v, gate = next_q, next_k, next_v, next_gate
            decay, beta = next_decay, next_beta
        tl.store(state + page * page_stride + own, memory)
