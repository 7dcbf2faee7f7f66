"""The experts of each token, and the tokens grouped by expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headstock.spi import Experts
from headstock_triton.device_function import device_function
from headstock_triton.pair_blocks import (
    TABLE_ROWS,
    Blocks,
    PairLayout,
    Routes,
    count_blocks,
    place_pairs,
)
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous


@device_function
def _sortable_bits(bits):
    """Map float32 bits to integers in the same order as the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# Both change between steps: specialized kernels would be compiled while requests wait.
@triton.jit(do_not_specialize=("tokens", "blocks"))
def route_kernel(
    scores,
    slots,
    ids,
    weights,
    counts,
    order,
    table,
    tokens,
    page_size,
    blocks,
    EXPERTS: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    CHOSEN: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SHORT: tl.constexpr,
    PLACE: tl.constexpr,
    COUNT: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    TABLE: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The experts of some tokens.

    Score and expert are searched as one integer, so that ties go to the lower expert.
    """
    begin_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    here = token < tokens
    mask = here[:, None] & (expert < EXPERTS)[None, :]
    score = tl.load(
        scores + token.to(tl.int64)[:, None] * EXPERTS + expert[None, :], mask, other=0.0
    )
    score = tl.where((expert < EXPERTS)[None, :], score.to(tl.float32), -float("inf"))
    broken = tl.max((score != score).to(tl.int32), 1) > 0
    # one zero; invalid rows choose arbitrarily
    score = tl.where((score != score) | (score == 0.0), 0.0, score)
    top = tl.max(score, 1)
    mass = tl.sum(tl.exp(score - top[:, None]), 1)
    if SHORT:  # the lower half of a bfloat16's bits is free for the expert
        least: tl.constexpr = -(2**31)
        key = (_sortable_bits(score.to(tl.int32, bitcast=True)) & -65536) | (WIDTH - 1 - expert)[
            None, :
        ]
    else:
        least: tl.constexpr = -(2**63)  # type: ignore[no-redef]
        key = (
            _sortable_bits(score.to(tl.int32, bitcast=True)).to(tl.int64) * 4294967296
            + (WIDTH - 1 - expert)[None, :]
        )
    key = tl.where(mask, key, least)
    slot_index = tl.arange(0, SLOTS)[None, :]
    best_ids = tl.zeros((TOKENS, SLOTS), tl.int32)
    best = tl.zeros((TOKENS, SLOTS), tl.float32)
    slot = tl.zeros((TOKENS, WIDTH), tl.int32) - 1
    for index in tl.static_range(CHOSEN):
        largest = tl.max(key, 1)
        if SHORT:
            chosen_id = WIDTH - 1 - (largest & 65535)
            value = (_sortable_bits(largest & -65536) & -65536).to(tl.float32, bitcast=True)
        else:
            chosen_id = (WIDTH - 1 - (largest & 4294967295)).to(tl.int32)
            value = _sortable_bits((largest >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        hit = expert[None, :] == chosen_id[:, None]
        key = tl.where(hit, least, key)
        slot = tl.where(hit, index, slot)
        best_ids = tl.where(slot_index == index, chosen_id[:, None], best_ids)
        best = tl.where(slot_index == index, (tl.exp(value - top) / mass)[:, None], best)
    if RENORMALIZE:
        best = best / tl.sum(best, 1)[:, None]
    # A row with NaN gets weights of NaN, so that its logits show that it is invalid.
    best = tl.where(broken[:, None], float("nan"), best)
    routed = here
    if PADDED:
        routed = here & (tl.load(slots + token, here, other=0) >= page_size)
    there = here[:, None] & (slot_index < CHOSEN)
    at = token[:, None] * CHOSEN + slot_index
    # Padding gets no expert: otherwise padding rows of a graph would read the weights of unused
    # experts.
    own_ids = best_ids - FIRST
    is_own = routed[:, None] & (own_ids >= 0) & (own_ids < HELD)
    tl.store(ids + at, tl.where(is_own, own_ids, HELD), there)
    tl.store(weights + at, best, there)
    own = (expert >= FIRST) & (expert < FIRST + HELD)
    chosen = (routed[:, None] & own[None, :] & (slot >= 0)).to(tl.int32)
    count = tl.sum(chosen, 0)
    if PLACE:
        none = tl.zeros((WIDTH,), tl.int32)
        place_pairs(
            chosen,
            slot,
            token,
            count,
            none,
            order,
            table,
            0,
            blocks,
            CHOSEN,
            WIDTH,
            FIRST,
            ROWS,
            TABLE,
            STEPS,
        )
    if COUNT:
        tl.store(counts + tl.program_id(0) * WIDTH + expert, count)


def route_tokens(
    scores: Tensor,
    experts: Experts,
    slots: Tensor | None = None,
    page_size: int = 0,
    rows: int = 0,
    *,
    pdl: bool = False,
) -> tuple[Routes, Blocks | None]:
    """Each token's experts, and its pairs in blocks of `rows` unless that is 0; the host reads
    nothing.

    scores: [tokens, experts]
    slots: [tokens] int64; tokens below `page_size`, in the dummy page, are padding
    """
    tokens, count, device = len(scores), experts.count, scores.device
    held = experts.held or count
    layout = PairLayout.of(tokens, count)
    blocks = count_blocks(tokens * experts.per_token, held, rows) if rows else 0
    routes = Routes(
        ids=torch.empty(tokens, experts.per_token, dtype=torch.int32, device=device),
        weights=torch.empty(tokens, experts.per_token, dtype=torch.float32, device=device),
        count=held,
    )
    counts, order, table = layout.make_buffers(blocks, rows, device)
    route_kernel[(layout.programs,)](
        scores.contiguous(),
        # A pointer that this variant of the kernel does not read.
        routes.ids if slots is None else slots,
        routes.ids,
        routes.weights,
        counts,
        order,
        table,
        tokens,
        page_size,
        blocks,
        EXPERTS=count,
        FIRST=experts.first,
        HELD=held,
        CHOSEN=experts.per_token,
        RENORMALIZE=experts.renormalize,
        PADDED=slots is not None,
        SHORT=scores.dtype == torch.bfloat16 and layout.width <= 65536,
        PLACE=rows > 0 and layout.is_alone,
        COUNT=rows > 0 and not layout.is_alone,
        TOKENS=layout.part,
        WIDTH=layout.width,
        SLOTS=triton.next_power_of_2(experts.per_token),
        ROWS=max(rows, 1),
        TABLE=TABLE_ROWS,
        STEPS=triton.cdiv(blocks, TABLE_ROWS) if layout.is_alone else 0,
        num_warps=layout.warps,
        **launch_options(pdl),
    )
    if rows == 0:
        return routes, None
    if not layout.is_alone:
        layout.place(routes, counts, order, table, rows, first=experts.first)
    return routes, Blocks(routes=routes, order=order, table=table, rows=rows)
