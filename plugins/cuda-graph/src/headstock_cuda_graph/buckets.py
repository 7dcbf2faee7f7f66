"""Sizes of graphs."""

from __future__ import annotations


def buckets(max_rows: int) -> tuple[int, ...]:
    """The sizes for steps of up to `max_rows` rows, largest first.

    A step is padded to the next size: by at most half below 8 rows, 7 rows below 64, and 15 above.
        23 sizes reach 256.
    """
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 16), max_rows}
    return tuple(sorted((size for size in sizes if 0 < size <= max_rows), reverse=True))


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """The token counts for steps with prompt tokens of up to `max_tokens`, largest first; the
    largest may exceed it.

    A step is padded to the next: by 31 tokens at most up to 256, and by a quarter above. All are
    multiples of 16, of which Triton makes one kernel; other counts would be compiled for
    themselves. 22 sizes reach 2,048.
    """
    sizes, size = [], 0
    while size < max_tokens:
        size += 16 if size < 64 else 32 if size < 256 else 2 ** (size.bit_length() - 3)
        sizes.append(size)
    return tuple(reversed(sizes))
