"""Batch sizes of graphs."""

from __future__ import annotations


def buckets(most_rows: int) -> tuple[int, ...]:
    """The sizes for steps of up to `most_rows` rows, largest first.

    A step is padded to the next size: by at most half below 8 rows, 7 rows below 64, and 15 above. 23 sizes reach 256.
    """
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, most_rows, 16), most_rows}
    return tuple(sorted((size for size in sizes if 0 < size <= most_rows), reverse=True))
