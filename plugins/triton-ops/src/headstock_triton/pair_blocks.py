"""Pairs of tokens and experts, grouped by expert into blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from headstock_triton.device_function import device_function

_CELLS = 4096
"""Cells (token, expert) per program if there are many programs."""
_FEW_PROGRAMS = 128
"""Number of programs up to which each gets its own multiprocessor on a large GPU."""
_ALONE_CELLS = 8192
"""Number of cells up to which one program routes and places, in one launch."""
TABLE_ROWS = 32
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
def place_pairs(
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
    place_pairs(
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


@frozen(kw_only=True)
class PairLayout:
    """How tokens are cut into programs.

    width: columns of the experts    part: tokens of a program
    is_alone: whether one program has all tokens
    """

    tokens: int
    width: int
    part: int
    is_alone: bool

    @classmethod
    def of(cls, tokens: int, count: int) -> PairLayout:
        """That of so many tokens and experts."""
        width = max(triton.next_power_of_2(count), 16)
        is_alone = triton.next_power_of_2(tokens) * width <= _ALONE_CELLS
        # Every program of `place_kernel` reads the counts of all programs: twice the cells mean
        # half the counts.
        cells = _CELLS if tokens * width <= _CELLS * _FEW_PROGRAMS else 2 * _CELLS
        part = triton.next_power_of_2(tokens) if is_alone else max(cells // width, 1)
        return cls(tokens=tokens, width=width, part=part, is_alone=is_alone)

    @property
    def programs(self) -> int:
        """How many there are."""
        return -(-self.tokens // self.part)

    @property
    def warps(self) -> int:
        """Of a program."""
        return min(max(self.part * self.width // 256, 1), 8)

    def make_buffers(
        self, blocks: int, rows: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Room for counts, `Blocks.order` and `Blocks.table`."""
        count = 0 if self.is_alone else self.programs
        return (
            torch.empty(count, self.width, dtype=torch.int32, device=device),
            torch.empty(blocks * rows, dtype=torch.int32, device=device),
            torch.empty(blocks, 2, dtype=torch.int32, device=device),
        )

    def place(
        self,
        routes: Routes,
        counts: Tensor,
        order: Tensor,
        table: Tensor,
        rows: int,
        *,
        first: int,
    ) -> None:
        """Place the pairs that several programs have counted.   writes: order, table"""
        # A second launch: a pair's position depends on the counts of all earlier programs, and
        # programs of one launch cannot wait for each other. The order of atomics is undefined.
        place_kernel[(max(self.programs, triton.cdiv(len(table), TABLE_ROWS)),)](
            routes.ids,
            counts,
            order,
            table,
            self.tokens,
            self.programs,
            len(table),
            FIRST=first,
            CHOSEN=routes.ids.shape[1],
            TOKENS=self.part,
            WIDTH=self.width,
            ROWS=rows,
            TABLE=TABLE_ROWS,
            COUNTS=triton.next_power_of_2(triton.cdiv(self.programs, TABLE_ROWS)),
            num_warps=8,
        )


@triton.jit(do_not_specialize=("tokens", "blocks"))
def arrange_kernel(
    chosen_ids,
    slots,
    ids,
    counts,
    order,
    table,
    tokens,
    page_size,
    blocks,
    HELD: tl.constexpr,
    CHOSEN: tl.constexpr,
    PADDED: tl.constexpr,
    PLACE: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TABLE: tl.constexpr,
    STEPS: tl.constexpr,
):
    """As the end of `route_kernel`, for experts that were chosen before."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    routed = here
    if PADDED:
        routed = here & (tl.load(slots + token, here, other=0) >= page_size)
    expert = tl.arange(0, WIDTH)
    slot = tl.zeros((TOKENS, WIDTH), tl.int32) - 1
    for index in tl.static_range(CHOSEN):
        id = tl.load(chosen_ids + token * CHOSEN + index, here, other=HELD).to(tl.int32)
        id = tl.where(routed, id, HELD)
        tl.store(ids + token * CHOSEN + index, id, here)
        slot = tl.where(expert[None, :] == id[:, None], index, slot)
    chosen = ((slot >= 0) & (expert < HELD)[None, :]).to(tl.int32)
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
            0,
            ROWS,
            TABLE,
            STEPS,
        )
    else:
        tl.store(counts + tl.program_id(0) * WIDTH + expert, count)


def arrange_pairs(
    ids: Tensor,
    weights: Tensor,
    count: int,
    slots: Tensor | None = None,
    page_size: int = 0,
    rows: int = 1,
) -> Blocks:
    """The pairs of tokens and experts in blocks of `rows`; the host reads nothing.

    ids: [tokens, per_token] int64; `count`, or more, is no expert
    weights: [tokens, per_token]
    slots: as for `route_tokens`
    """
    tokens, per_token = ids.shape
    layout = PairLayout.of(tokens, count)
    blocks = count_blocks(tokens * per_token, count, rows)
    routes = Routes(
        ids=torch.empty_like(ids, dtype=torch.int32), weights=weights.float(), count=count
    )
    counts, order, table = layout.make_buffers(blocks, rows, ids.device)
    arrange_kernel[(layout.programs,)](
        ids.contiguous(),
        # A pointer that this variant of the kernel does not read.
        ids if slots is None else slots,
        routes.ids,
        counts,
        order,
        table,
        tokens,
        page_size,
        blocks,
        HELD=count,
        CHOSEN=per_token,
        PADDED=slots is not None,
        PLACE=layout.is_alone,
        TOKENS=layout.part,
        WIDTH=layout.width,
        ROWS=rows,
        TABLE=TABLE_ROWS,
        STEPS=triton.cdiv(blocks, TABLE_ROWS) if layout.is_alone else 0,
        num_warps=layout.warps,
    )
    if not layout.is_alone:
        layout.place(routes, counts, order, table, rows, first=0)
    return Blocks(routes=routes, order=order, table=table, rows=rows)


def count_blocks(pairs: int, experts: int, rows: int) -> int:
    """The maximum number of blocks of `rows` for these pairs: each used expert may have a partial
    one."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows
