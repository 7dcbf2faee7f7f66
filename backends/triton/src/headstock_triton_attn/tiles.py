"""How attention is cut into programs: by the shape of a layer and the device alone.

The number of rows has no say, so that a row gets the same bits alone and in a batch, and graphs
stay valid. All numbers follow from the arithmetic beside them; none is measured yet.
"""

from __future__ import annotations

from attrs import frozen

MOST_SPLITS = 64
LEAST_TOKENS = 128
"""Tokens of a part of the keys, but for the last; less work would not pay for the merge."""
ACCUMULATED = 128 * 256
"""Float32 sums that a program keeps: 128 registers for each thread of eight warps, of 255."""
SMALL_SHARED = 99 * 1024
"""Shared memory that every GPU from sm_80 on has for a program; sm_90 has 227 KiB."""
RESERVED = 2048
"""Bytes of shared memory for reductions and page numbers."""


@frozen(kw_only=True)
class Tile:
    """The block of queries and keys that a program holds at once.

    queries: tokens of a row
    group: query heads of one KV head
    width: queries times heads, padded to a power of two
    tokens: keys and values
    """

    queries: int
    group: int
    width: int
    tokens: int
    warps: int
    stages: int


def choose_prompt_tile(
    *, ratio: int, head_dim: int, itemsize: int, shared: int = SMALL_SHARED
) -> Tile:
    """The tile for several queries of a row.

    ratio: query heads of a KV head
    itemsize: bytes of an element of queries and keys as they are multiplied
    shared: bytes of shared memory of a program
    """
    dim = pad_head(head_dim)
    if itemsize == 4:
        # Without tensor cores: a thread holds an operand in registers.
        width, tokens = 16, 16
    else:
        width = max(16, min(128, ACCUMULATED // dim))
        tokens = max(16, min(64, 16384 // dim))
        # Queries, and two blocks of keys and of values, as Hopper's tensor cores read them while
        # the next ones arrive. At 512: 64 * 1 KiB + 4 * 32 * 1 KiB = 192 KiB.
        while (width + 4 * tokens) * dim * itemsize > shared - RESERVED and width > 16:
            width, tokens = max(16, width // 2), max(16, tokens // 2)
    group = min(ratio, width)
    return Tile(
        queries=width // group,
        group=group,
        width=width,
        tokens=tokens,
        warps=8 if width * dim >= 128 * 64 or itemsize == 4 else 4,
        stages=2,
    )


def choose_split_tile(
    *, queries: int, ratio: int, head_dim: int, itemsize: int, shared: int = SMALL_SHARED
) -> Tile:
    """The tile for a few queries a row, over parts of its keys; 1 for decode steps.

    Its other arguments are those of `choose_prompt_tile`.
    """
    most = choose_prompt_tile(ratio=ratio, head_dim=head_dim, itemsize=itemsize, shared=shared)
    # Tensor cores take 16 queries at a time. With no more, operands and sums are 128 registers of
    # eight warps at 512, and one block of keys and of values beside the queries is 80 KiB: two
    # programs fit on a processor, and one loads while the other computes.
    width = min(most.width, max(16, round_up(queries * ratio)))
    group = min(ratio, width)
    dim = pad_head(head_dim)
    is_narrow = width == 16 and itemsize < 4
    return Tile(
        queries=1 if queries == 1 else width // group,
        group=group,
        width=width,
        # Up to 64, which divides the usual page.
        tokens=min(64, 16384 // dim) if is_narrow else most.tokens,
        warps=8 if dim > 256 else 4 if is_narrow else most.warps,
        stages=3 if is_narrow else most.stages,
    )


def choose_splits(
    *, kv_heads: int, tile: Tile, ratio: int, max_seq_len: int, processors: int
) -> int:
    """In how many parts keys are read at most: two programs a processor for one long row.

    returns: a power of two
    """
    programs = kv_heads * -(-ratio // tile.group)
    most = min(MOST_SPLITS, round_up(-(-max_seq_len // LEAST_TOKENS)))
    return min(most, round_up(-(-2 * processors // programs)))


def pad_head(head_dim: int) -> int:
    """The head size as it is multiplied: a power of two, at least 16 for tensor cores."""
    return max(16, round_up(head_dim))


def round_up(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
