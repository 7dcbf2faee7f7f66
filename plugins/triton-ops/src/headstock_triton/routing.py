"""The experts of each token, and the tokens grouped by expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock.spi import Experts
from headstock_triton.device_function import device_function
from headstock_triton.pdl import begin_next, launch_options, wait_for_previous

_CELLS = 4096
"""Cells (token, expert) per program if there are many programs."""
_FEW_PROGRAMS = 128
"""Number of programs up to which each gets its own multiprocessor on a large GPU."""
_ALONE_CELLS = 8192
"""Number of cells up to which one program routes and places, in one launch."""
_TABLE_ROWS = 32
"""Entries of the block table, and rows of counts, that are processed at once."""


@frozen(kw_only=True, eq=False)
class Routes:
    """The experts of each token, best first, by their numbers among those of this rank. Padding
    tokens have the number `count`, which is no expert, and so have experts of other ranks.

    ids: [tokens, per_token] int32    weights: [tokens, per_token] float32
    """

    ids: Tensor
    weights: Tensor
    count: int


@frozen(kw_only=True, eq=False)
class Blocks:
    """Pairs (token, slot) in blocks of `rows` that share an expert; its last block may have fewer.

    order: [blocks * rows] int32, the pair `token * per_token + slot` at each position; undefined
        where a block has fewer
    table: [blocks, 2] int32, each block's expert and how many pairs it has; 0 for blocks past the
        last
    """

    routes: Routes
    order: Tensor
    table: Tensor
    rows: int


@device_function
def _sortable_bits(bits):
    """Map float32 bits to integers in the same order as the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@device_function
def _place_pairs(
    chosen,
    slot,
    token,
    total,
    before,
    order,
    table,
    first_block,
    blocks,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    TABLE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Put the program's pairs into the blocks of their experts, in the order of tokens.

    It also fills a part of the table.

    chosen, slot: [tokens, experts], of which those of this rank begin at `FIRST`
    total, before: [experts], pairs of all programs and of those before this one
    writes: order, table from `first_block`
    """
    expert = tl.arange(0, WIDTH)
    needed = (total + ROWS - 1) // ROWS
    end = tl.cumsum(needed, 0)
    begin = end - needed
    # By prefix sums rather than atomics, whose order is undefined.
    place = (begin * ROWS + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    tl.store(order + place, token[:, None] * CHOSEN + slot, chosen > 0)
    for step in range(STEPS):
        block = first_block + step * TABLE + tl.arange(0, TABLE)
        owner = tl.sum((end[None, :] <= block[:, None]).to(tl.int32), 1)
        remaining = total[None, :] - (block[:, None] - begin[None, :]) * ROWS
        remaining = tl.sum(tl.where(expert[None, :] == owner[:, None], remaining, 0), 1)
        there = block < blocks
        tl.store(table + 2 * block, tl.minimum(owner, WIDTH - 1) - FIRST, there)
        tl.store(table + 2 * block + 1, tl.minimum(remaining, ROWS), there)


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
        _place_pairs(
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


@triton.jit(do_not_specialize=("tokens", "programs", "blocks"))
def place_kernel(
    ids,
    counts,
    order,
    table,
    tokens,
    programs,
    blocks,
    FIRST: tl.constexpr,
    CHOSEN: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TABLE: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Each program places the tokens that one program of `route_kernel` counted, and fills a part
    of the table."""
    program = tl.program_id(0)
    token = program * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, WIDTH)
    # Summed over rows once, at the end: only that sum needs all threads of the program.
    all_counts = tl.zeros((TABLE, WIDTH), tl.int32)
    earlier = tl.zeros((TABLE, WIDTH), tl.int32)
    for step in range(COUNTS):
        counter = step * TABLE + tl.arange(0, TABLE)
        there = (counter < programs)[:, None]
        count = tl.load(counts + counter[:, None] * WIDTH + expert[None, :], there, other=0)
        all_counts += count
        earlier += tl.where((counter < program)[:, None], count, 0)
    total, before = tl.sum(all_counts, 0), tl.sum(earlier, 0)
    slot = tl.zeros((TOKENS, WIDTH), tl.int32) - 1
    for index in tl.static_range(CHOSEN):
        chosen_id = tl.load(ids + token * CHOSEN + index, token < tokens, other=WIDTH)
        # There may be a column for the number that is no expert: it is not counted.
        slot = tl.where(expert[None, :] == chosen_id[:, None] + FIRST, index, slot)
    real = (tl.load(counts + program * WIDTH + expert, program < programs, other=0) > 0)[None, :]
    chosen = (real & (slot >= 0)).to(tl.int32)
    _place_pairs(
        chosen,
        slot,
        token,
        total,
        before,
        order,
        table,
        program * TABLE,
        blocks,
        CHOSEN,
        WIDTH,
        FIRST,
        ROWS,
        TABLE,
        1,
    )


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
    width = max(triton.next_power_of_2(count), 16)
    alone = triton.next_power_of_2(tokens) * width <= _ALONE_CELLS
    # Every program of `place_kernel` reads the counts of all programs: twice the cells mean half
    # the counts.
    cells = _CELLS if tokens * width <= _CELLS * _FEW_PROGRAMS else 2 * _CELLS
    part = triton.next_power_of_2(tokens) if alone else max(cells // width, 1)
    programs = triton.cdiv(tokens, part)
    blocks = count_blocks(tokens * experts.per_token, held, rows) if rows else 0
    routes = Routes(
        ids=torch.empty(tokens, experts.per_token, dtype=torch.int32, device=device),
        weights=torch.empty(tokens, experts.per_token, dtype=torch.float32, device=device),
        count=held,
    )
    counts = torch.empty(0 if alone else programs, width, dtype=torch.int32, device=device)
    order = torch.empty(blocks * rows, dtype=torch.int32, device=device)
    table = torch.empty(blocks, 2, dtype=torch.int32, device=device)
    route_kernel[(programs,)](
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
        SHORT=scores.dtype == torch.bfloat16 and width <= 65536,
        PLACE=rows > 0 and alone,
        COUNT=rows > 0 and not alone,
        TOKENS=part,
        WIDTH=width,
        SLOTS=triton.next_power_of_2(experts.per_token),
        ROWS=max(rows, 1),
        TABLE=_TABLE_ROWS,
        STEPS=triton.cdiv(blocks, _TABLE_ROWS) if alone else 0,
        num_warps=min(max(part * width // 256, 1), 8),
        **launch_options(pdl),
    )
    if rows == 0:
        return routes, None
    # A second launch: a pair's position depends on the counts of all earlier programs, and programs
    # of one launch cannot wait for each other. The order of atomics is undefined.
    if not alone:
        place_kernel[(max(programs, triton.cdiv(blocks, _TABLE_ROWS)),)](
            routes.ids,
            counts,
            order,
            table,
            tokens,
            programs,
            blocks,
            FIRST=experts.first,
            CHOSEN=experts.per_token,
            TOKENS=part,
            WIDTH=width,
            ROWS=rows,
            TABLE=_TABLE_ROWS,
            COUNTS=triton.next_power_of_2(triton.cdiv(programs, _TABLE_ROWS)),
            num_warps=8,
        )
    return routes, Blocks(routes=routes, order=order, table=table, rows=rows)


def count_blocks(pairs: int, experts: int, rows: int) -> int:
    """The maximum number of blocks of `rows` for these pairs: each used expert may have a partial
    one."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows
