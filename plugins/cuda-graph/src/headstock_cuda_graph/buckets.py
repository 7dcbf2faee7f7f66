"""Which batch sizes and token counts are captured."""

from __future__ import annotations


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """The sizes for steps of up to `max_rows` rows, largest first.

    A step is padded to the next size: by at most half below 8 rows, by 7 rows below 64, by 15
    above. 23 sizes reach 256.
    """
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 16), max_rows}
    return tuple(sorted((size for size in sizes if 0 < size <= max_rows), reverse=True))


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """The token counts of prompt steps, largest first; the largest may exceed `max_tokens`.

    A step is padded to the next count: by at most 31 tokens up to 256, by a quarter up to 2,048, by
    511 tokens above. All are multiples of 16, for which Triton compiles one kernel; each other
    count would have its own. 22 counts reach 2,048, and 26 reach 4,096.
    """
    sizes, size = [], 0
    while size < max_tokens:
        size += 16 if size < 64 else 32 if size < 256 else 2 ** min(size.bit_length() - 3, 9)
        sizes.append(size)
    return tuple(reversed(sizes))
