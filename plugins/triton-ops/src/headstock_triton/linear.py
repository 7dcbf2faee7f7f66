"""Products of a few tokens with a weight, which is read once; reading it dominates the time.

The norm before a product and the activation or the sum after it are parts of its kernel, and the
weight is loaded before the kernel waits for its tokens (see `pdl`).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import Weight
from headstock_triton.options import MOST_TOKENS
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous
from headstock_triton.portable import add_product, round_to, widen_to

MOST_FUSED_WIDTH = 1024
"""Width of a token up to which several tokens are normalized inside a product.

Each program normalizes all of them again. On an H200 with 8 rows, this cut a layer of the 0.6B
shape from 47 to 29 us, but a layer as wide as the 30B-A3B shape (2,048) took 71 us instead of 69.
"""
MOST_PART_WIDTH = 6144
"""Width of the weight's rows up to which `tokens_kernel` holds 16 of them in shared memory."""
LEAST_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory per program that `tokens_kernel` needs, available from Hopper on."""


@frozen(kw_only=True)
class ProductTile:
    """Rows of the weight that a program reads, its warps, and whether tensor cores sum them."""

    rows: int
    warps: int
    dot: bool = False


def choose_product_tile(tokens: int, width: int, *, gated: bool = False) -> ProductTile:
    """The tile for this number of tokens and width; `gated`: rows of gate, and as many of up."""
    if tokens == 1:
        # On an H200 the best of seven, or close to it, for each product of the shapes 0.6B and 8B.
        block = triton.next_power_of_2(width)
        rows = max(min(4, 32_768 // block) // (2 if gated else 1), 1)
        return ProductTile(rows=rows, warps=min(max(block // 512, 1), 8))
    # The minimum rows of tensor cores, so that there are programs for all processors.
    return ProductTile(rows=16, warps=4 if width <= 3072 else 8, dot=True)


@triton.jit
def rows_kernel(
    x,
    weight,
    scales,
    bias,
    norm,
    total,
    out,
    outs,
    eps,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some rows of the weight with all tokens; the rows are read before the program waits.

    NORM: the tokens are normalized first. GATED: rows of gate and up give silu(gate) * up. ADD: the
    outputs are added to `total` in place, whose numbers no other program reads.

    Every step is rounded as the torch operations round it.
    """
    begin_next(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    k = tl.arange(0, BLOCK)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end read the last one again, so that loads need no mask for them.
    source = weight + tl.minimum(row, outs - 1).to(tl.int64)[:, None] * WIDTH + k
    inside = k < WIDTH
    w = tl.load(source, inside, other=0.0, eviction_policy="evict_first")
    if GATED:
        up_source = source + outs.to(tl.int64) * WIDTH
        up = tl.load(up_source, inside, other=0.0, eviction_policy="evict_first")
    if NORM:
        gain = tl.load(norm + k, inside, other=0.0).to(tl.float32)
    exists = row < outs
    if SCALED:
        factor = tl.load(scales + row, exists, other=0.0)
        if GATED:
            up_factor = tl.load(scales + outs + row, exists, other=0.0)
    if BIAS:
        shift = tl.load(bias + row, exists, other=0.0).to(tl.float32)
        if GATED:
            up_shift = tl.load(bias + outs + row, exists, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    # All loads first: the sums below would delay loads after them.
    values, olds = (), ()
    for token in tl.static_range(TOKENS):
        values = values + (tl.load(x + token * WIDTH + k, inside, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        if ADD:
            old = tl.load(total + token * outs + row, exists, other=0.0)
            olds = olds + (old,)  # type: ignore[assignment]  # noqa: RUF005
    for token in tl.static_range(TOKENS):
        value = values[token].to(tl.float32)  # type: ignore[var-annotated]
        if NORM:
            scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
            value = round_to(value * scale * gain, dtype).to(tl.float32)
        result = tl.sum(w.to(tl.float32) * value, 1)
        if SCALED:
            result *= factor
        if BIAS:
            result += shift
        result = round_to(result, dtype)
        if GATED:
            upper = tl.sum(up.to(tl.float32) * value, 1)
            if SCALED:
                upper *= up_factor
            if BIAS:
                upper += up_shift
            gate = result.to(tl.float32)
            silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
            result = round_to(silu * round_to(upper, dtype).to(tl.float32), dtype)
        if ADD:
            result = round_to(olds[token].to(tl.float32) + result.to(tl.float32), dtype)
        tl.store(out + token * outs + row, result, exists)


# The number of tokens changes between steps.
@triton.jit(do_not_specialize=("tokens",))
def tokens_kernel(
    x,
    weight,
    scales,
    bias,
    norm,
    total,
    out,
    tokens,
    outs,
    eps,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEATS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same as `rows_kernel`, in tensor cores: each of `PARTS` warps sums a part of each row.

    The weight is the left factor, whose tile has 16 rows; tokens are padded to `SEATS`. A norm
    needs the whole token at once, in one step.
    """
    begin_next(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, PARTS)[:, None, None]
    at = part * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    # Rows past the end read the last one again, so that loads need no mask for them.
    source = weight + tl.minimum(row, outs - 1).to(tl.int64)[None, :, None] * WIDTH + at
    up_source = source + outs.to(tl.int64) * WIDTH
    weights, ups = (), ()
    for step in tl.static_range(STEPS):
        skipped = step * PARTS * BLOCK
        inside = at < WIDTH - skipped
        w = tl.load(source + skipped, inside, other=0.0, eviction_policy="evict_first")
        weights = weights + (w,)  # type: ignore[assignment]  # noqa: RUF005
        if GATED:
            up = tl.load(up_source + skipped, inside, other=0.0, eviction_policy="evict_first")
            ups = ups + (up,)  # type: ignore[assignment]  # noqa: RUF005
    exists = row < outs
    k = tl.arange(0, PARTS * BLOCK)
    if NORM:
        gain = tl.load(norm + k, k < WIDTH, other=0.0).to(tl.float32)
    if SCALED:
        factor = tl.load(scales + row, exists, other=0.0)
        if GATED:
            up_factor = tl.load(scales + outs + row, exists, other=0.0)
    if BIAS:
        shift = tl.load(bias + row, exists, other=0.0).to(tl.float32)
        if GATED:
            up_shift = tl.load(bias + outs + row, exists, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    token = tl.arange(0, SEATS)
    there = exists[:, None] & (token < tokens)[None, :]
    place = token[None, :] * outs + row[:, None]
    if ADD:
        old = tl.load(total + place, there, other=0.0).to(tl.float32)
    sums = tl.zeros((PARTS, ROWS, SEATS), tl.float32)
    up_sums = tl.zeros((PARTS, ROWS, SEATS), tl.float32)
    for step in tl.static_range(STEPS):
        skipped = step * PARTS * BLOCK
        value = tl.load(
            x + token[:, None] * WIDTH + k[None, :] + skipped,
            (token < tokens)[:, None] & (k < WIDTH - skipped)[None, :],
            other=0.0,
        )
        if NORM:
            wide = value.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
            value = round_to(wide * scale * gain[None, :], dtype)
        value = tl.permute(tl.reshape(value, (SEATS, PARTS, BLOCK)), (1, 2, 0))
        sums = add_product(widen_to(weights[step], dtype), value, sums)
        if GATED:
            up_sums = add_product(widen_to(ups[step], dtype), value, up_sums)
    result = tl.sum(sums, 0)
    if SCALED:
        result *= factor[:, None]
    if BIAS:
        result += shift[:, None]
    result = round_to(result, dtype)
    if GATED:
        upper = tl.sum(up_sums, 0)
        if SCALED:
            upper *= up_factor[:, None]
        if BIAS:
            upper += up_shift[:, None]
        gate = result.to(tl.float32)
        silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
        result = round_to(silu * round_to(upper, dtype).to(tl.float32), dtype)
    if ADD:
        result = round_to(old + result.to(tl.float32), dtype)
    tl.store(out + place, result, there)


@cache
def _has_room(device: torch.device) -> bool:
    """Whether the programs of `tokens_kernel` fit on the device."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) >= LEAST_SHARED_MEMORY


def can_fuse(tokens: int, width: int, device: torch.device) -> bool:
    """Whether normalizing this number of tokens of this width inside a product is fast."""
    return tokens == 1 or (
        tokens <= MOST_TOKENS and width <= MOST_FUSED_WIDTH and _has_room(device)
    )


def can_add(tokens: int, width: int, device: torch.device) -> bool:
    """Whether tokens of this width are multiplied here, and added to a stream if asked."""
    return tokens == 1 or (tokens <= MOST_TOKENS and width <= MOST_PART_WIDTH and _has_room(device))


def small_linear(
    x: Tensor,
    weight: Weight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    total: Tensor | None = None,
    tile: ProductTile | None = None,
    pdl: bool = False,
) -> Tensor:
    """x W^T + b, summed in float32, for tokens that `can_add` takes.

    norm: [in], the tokens are normalized and multiplied with it first
    gated: the weight's two halves are gate and up; returns silu(gate) * up
    total: [tokens, out], to which the product is added in place and which is returned

    x: [tokens, in] of 16 bits    weight: [out, in], plain or of 8 bits with a scale for each row
    returns: [tokens, out]
    """
    numbers, scales, bias = weight.tensor, weight.scales, weight.bias
    (tokens, width), outs = x.shape, len(numbers) // (2 if gated else 1)
    out = x.new_empty(tokens, outs) if total is None else total
    x = x.contiguous()
    # A pointer that this variant of the kernel does not read.
    bias_or_weight = numbers if bias is None else bias
    scales_or_weight = numbers if scales is None else scales
    assert can_add(tokens, width, x.device), "see can_add"
    tile = tile or choose_product_tile(tokens, width, gated=gated)
    norm_or_weight = numbers if norm is None else norm
    pointers = (x, numbers, scales_or_weight, bias_or_weight, norm_or_weight, out, out)
    constants = {
        "WIDTH": width,
        "SCALED": scales is not None,
        "BIAS": bias is not None,
        "NORM": norm is not None,
        "GATED": gated,
        "ADD": total is not None,
        "ROWS": tile.rows,
        "num_warps": tile.warps,
        **launch_options(pdl),
    }
    grid, block = (triton.cdiv(outs, tile.rows),), triton.next_power_of_2(width)
    if not tile.dot:
        rows_kernel[grid](*pointers, outs, eps, TOKENS=tokens, BLOCK=block, **constants)
        return out
    # A norm needs the whole token at once. Tensor cores sum at least 16 terms.
    step = max(block if norm is not None else min(block, 128 * tile.warps), 16)
    parts = min(tile.warps, step // 16)
    tokens_kernel[grid](
        *pointers,
        tokens,
        outs,
        eps,
        STEPS=triton.cdiv(width, step),
        PARTS=parts,
        BLOCK=step // parts,
        SEATS=8 if tokens <= 8 else 16,
        **constants,
    )
    return out
