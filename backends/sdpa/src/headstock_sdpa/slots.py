"""The slots in a layer's pool of the tokens that a step may see.

A *slot* is a token's position in `TokenRows`: the tokens of page p fill the slots from
`p * page_slots`. Padding points at slot 0, in the dummy page.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.spi.attention import AttentionStep
from headstock_sdpa.token_rows import TokenRows

SHRINK = 0.75
"""A bucket only ends at a row shorter than this fraction of its longest."""


@frozen(eq=False)
class Visible:
    """The positions that each row's queries see: `start` to `stop`, half open. All [rows]."""

    start: np.ndarray
    stop: np.ndarray
    lens: np.ndarray


def visible_positions(step: AttentionStep, window: int | None) -> Visible:
    """The positions that each row sees in a window of latest tokens, counted from its first
    query."""
    stop = step.host_context_lens
    if window is None:
        return Visible(np.zeros_like(stop), stop, stop)
    start = np.maximum(stop - step.host_query_lens - window + 1, 0)
    return Visible(start, stop, stop - start)


def _to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The numbers on the device, without waiting for it."""
    # A step's own lengths are read-only, which torch does not accept.
    numbers = numbers if numbers.flags.writeable else numbers.copy()
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def _find_slots(page_table: Tensor, rows: Tensor, positions: Tensor, tokens: TokenRows) -> Tensor:
    """The slot of each position of each row; `rows` and `positions` broadcast together.

    page_table: [rows, max_pages] int32
    """
    size = tokens.page_size
    pages = page_table[rows, torch.div(positions, size, rounding_mode="floor")]
    return pages * tokens.page_slots + positions % size


def ragged_slots(page_table: Tensor, seen: Visible, tokens: TokenRows) -> Tensor:
    """The slots of all visible tokens, row after row. [sum of lens]"""
    ends = np.cumsum(seen.lens)
    rows = np.repeat(np.arange(len(ends)), seen.lens)
    positions = np.arange(len(rows)) + np.repeat(seen.stop - ends, seen.lens)
    device = page_table.device
    return _find_slots(page_table, _to_device(rows, device), _to_device(positions, device), tokens)


@frozen(eq=False)
class PaddedBucket:
    """Decode rows of similar length, padded: positions `first` to `last`, longest first."""

    first: int
    last: int
    slots: Tensor  # [rows, longest], 0 where padded
    valid: Tensor | None  # [rows, longest] bool; None when nothing is padded


def _padded_slots(
    page_table: Tensor, seen: Visible, tokens: TokenRows
) -> tuple[Tensor, Tensor | None]:
    """The slots of the rows' visible tokens, and which are not padding (None: all).

    returns: [rows, longest] slots, [rows, longest] bool
    """
    device = page_table.device
    longest = int(seen.lens.max())
    counts = torch.arange(longest, dtype=torch.int32, device=device)
    valid = None
    if longest > seen.lens.min():
        valid = counts < _to_device(seen.lens, device)[:, None]
    if seen.start.any():
        positions = _to_device(seen.start, device)[:, None] + counts
        if valid is not None:
            positions *= valid  # padding reads entry 0, which every table has
        rows = torch.arange(len(seen.lens), device=device)[:, None]
        slots = _find_slots(page_table, rows, positions, tokens)
    else:
        size = tokens.page_size
        pages = page_table[:, : -(-longest // size), None]
        slots = (pages * tokens.page_slots + counts[:size]).flatten(1)[:, :longest]
    return (slots if valid is None else slots * valid), valid


def bucket_bounds(lens: list[int], least: int, most: int) -> Iterator[tuple[int, int]]:
    """Where to cut rows of descending lengths.

    A cut must save `least` tokens of padding, or keep a bucket within `most` tokens.
    """
    first = 0
    for row, tokens in enumerate(lens):
        longest = lens[first]
        saved = (longest - tokens) * (len(lens) - row)
        if (tokens < SHRINK * longest and saved >= least) or (
            row > first and (row + 1 - first) * longest > most
        ):
            yield first, row
            first = row
    yield first, len(lens)


def sort_into_buckets(
    lens: np.ndarray, least: int, most: int
) -> tuple[np.ndarray | None, list[np.ndarray]]:
    """Rows longest first, and split into buckets by `bucket_bounds`.

    If one bucket takes all rows, the order is None, and the bucket is in the batch's order.
    """
    longest_first = np.argsort(-lens, kind="stable")
    cuts = tuple(bucket_bounds(lens[longest_first].tolist(), least, most))
    # One bucket needs no order: queries and results stay in place, without a copy.
    if len(cuts) == 1:
        return None, [np.arange(len(lens))]
    return longest_first, [longest_first[first:last] for first, last in cuts]


def decode_buckets(
    page_table: Tensor, seen: Visible, tokens: TokenRows, least: int, most: int
) -> tuple[Tensor | None, tuple[PaddedBucket, ...]]:
    """The rows in buckets, longest first; in the batch's order (None) if one takes all.

    returns: order [rows], buckets
    """
    longest_first, cuts = sort_into_buckets(seen.lens, least, most)
    if longest_first is None:
        return None, (PaddedBucket(0, len(seen.lens), *_padded_slots(page_table, seen, tokens)),)
    order = _to_device(longest_first, page_table.device)
    buckets, first = [], 0
    for rows in cuts:
        last = first + len(rows)
        some = Visible(seen.start[rows], seen.stop[rows], seen.lens[rows])
        table = page_table.index_select(0, order[first:last])
        buckets.append(PaddedBucket(first, last, *_padded_slots(table, some, tokens)))
        first = last
    return order, tuple(buckets)
