"""How a decode step is split among programs, as measured."""

from __future__ import annotations

from attrs import frozen

MOST_SPLITS = 32
SMALL_GROUP = 4
"""Query heads per KV head up to which merging parts of a row is cheap."""
WIDE, NARROW = 128, 64
"""Tokens that a program reads at once: with one or two programs per processor, and with more."""


@frozen(kw_only=True)
class DecodeTile:
    """How a launch splits the keys of its rows.

    tokens: read by a program at once
    splits: a power of two, the maximum number of parts of a row's keys
    least_tokens: minimum size of a part, except the last
    warps: of a program
    stages: loads in flight ahead of a sum
    """

    tokens: int = 128
    splits: int = 1
    least_tokens: int = 1
    warps: int = 4
    stages: int = 2


def choose_tile(
    rows: int, *, heads: int, kv_heads: int, head_dim: int, processors: int
) -> DecodeTile:
    """How a step of `rows` rows is split; it only depends on their number, so that graphs stay
    valid.

    Measured on an H200 at rows of 96 to 16,384 tokens; see docs/benchmarks/log.md.
    """
    programs, small = rows * kv_heads, heads // kv_heads <= SMALL_GROUP
    # Keys and values of several loads ahead must fit in shared memory.
    wide, narrow = (tokens // (2 if head_dim > 128 else 1) for tokens in (WIDE, NARROW))
    if programs > 8 * processors:
        return DecodeTile(tokens=narrow)
    if programs > processors and (small or programs > 2 * processors):
        splits = (4 if programs <= 2 * processors else 2) if small else 1
        return DecodeTile(tokens=narrow, splits=splits, least_tokens=512)
    # Two programs per processor.
    splits = min(MOST_SPLITS, _round_down(2 * processors // programs))
    return DecodeTile(tokens=wide, splits=splits, least_tokens=1 if small else 256)


def _round_down(number: int) -> int:
    """The largest power of two up to `number`, at least 1."""
    return 1 << (max(number, 1).bit_length() - 1)
