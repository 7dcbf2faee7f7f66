"""Kernels whose programs exchange numbers with the same programs of the other ranks."""

from __future__ import annotations

import triton
import triton.language as tl

from headstock_triton.norm import rms_normalize
from headstock_triton.pdl import begin_next, wait_for_previous
from headstock_triton.portable import round_to
from headstock_triton.ranks.exchange import SETS, clear, mark, receive, send, sum_over_ranks

_SETS = tl.constexpr(SETS)


@triton.jit(do_not_specialize=("count",))
def sum_ranks_kernel(
    x,
    out,
    addresses,
    own,
    epochs,
    count,
    size,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum over ranks of a block of numbers.

    x, out: [count]    own: [SETS, WORLD, size]    epochs: [blocks]
    """
    begin_next(PDL)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    wait_for_previous(PDL)
    epoch = tl.load(epochs + block)
    term = tl.load(x + at, mask, other=0.0)
    total = sum_over_ranks(term, addresses, own, at, size, epoch, mask, at >= 0, RANK, WORLD)
    tl.store(out + at, round_to(total, x.dtype.element_ty), mask)
    tl.store(epochs + block, (epoch + 1) % _SETS)


@triton.jit
def add_norm_ranks_kernel(
    total,
    pending,
    weight,
    out,
    addresses,
    own,
    epochs,
    width,
    eps,
    part_stride,
    size,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of `headstock_triton.norm.add_norm_kernel`, whose term is summed over ranks first.

    The sums of each rank's parts, and the sum over ranks, are rounded as if each had a kernel.

    own: [SETS, WORLD, size]    epochs: [rows]
    """
    begin_next(PDL)
    program = tl.program_id(0)
    row = program.to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    mask = at < width
    gain = tl.load(weight + at, mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    epoch = tl.load(epochs + program)
    dtype: tl.constexpr = total.dtype.element_ty
    term = tl.load(pending + row + at, mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        term += tl.load(pending + part * part_stride + row + at, mask, other=0.0)
    x = tl.load(total + row + at, mask, other=0.0).to(tl.float32)
    term = sum_over_ranks(
        round_to(term, dtype), addresses, own, row + at, size, epoch, mask, mask, RANK, WORLD
    )
    x = round_to(x + round_to(term, dtype).to(tl.float32), dtype)
    tl.store(total + row + at, x, mask)
    tl.store(out + row + at, rms_normalize(x.to(tl.float32), gain, width, eps, dtype), mask)
    tl.store(epochs + program, (epoch + 1) % _SETS)


@triton.jit(do_not_specialize=("count",))
def join_ranks_kernel(
    x,
    out,
    addresses,
    own,
    epochs,
    count,
    width,
    size,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of numbers of each rank, joined by rows.

    x: [rows, width] of floats or int32, count in all    out: [rows, WORLD, width]
    own: [SETS, WORLD, size]; for int32 of int64    epochs: [blocks]
    """
    begin_next(PDL)
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    wait_for_previous(PDL)
    epoch = tl.load(epochs + block)
    slots = (epoch % _SETS) * WORLD
    before = ((epoch + 2) % _SETS) * WORLD
    place = (at // width).to(tl.int64) * (WORLD * width) + at % width
    dtype: tl.constexpr = x.dtype.element_ty
    sent = tl.load(x + at, mask, other=0)
    if dtype == tl.int32:
        sent = mark(sent)
    sent = send(sent, addresses, (slots + RANK) * size + at, mask, RANK, WORLD)
    tl.store(out + place + RANK * width, sent.to(dtype), mask)
    for peer in tl.static_range(WORLD):
        if peer != RANK:
            got = receive(own, (slots + peer) * size + at, mask, addresses, WORLD, sent.dtype)
            tl.store(out + place + peer * width, got.to(dtype), mask)
            clear(own, (before + peer) * size + at, at >= 0)
    tl.store(epochs + block, (epoch + 1) % _SETS)
