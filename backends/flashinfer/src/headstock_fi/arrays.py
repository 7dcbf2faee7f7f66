"""The arrays for FlashInfer's planner, from lengths on the host."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from headstock.spi.arrays import Ints


@frozen(eq=False)
class PageArrays:
    """A step's rows in FlashInfer's form.

    query_start: [rows + 1] int32, where each row's queries start
    page_start: [rows + 1] int32, likewise its pages
    last_page_lens: [rows] int32, tokens in each row's last page, 1 to page_size
    """

    query_start: Ints
    page_start: Ints
    last_page_lens: Ints

    @property
    def num_pages(self) -> int:
        """Pages of all rows."""
        return int(self.page_start[-1])


def page_arrays(query_lens: Ints, context_lens: Ints, page_size: int) -> PageArrays:
    """The arrays of rows with these lengths.   query_lens, context_lens: [rows] int32"""
    pages = -(-context_lens // page_size)
    return PageArrays(
        _prefix_sums(query_lens),
        _prefix_sums(pages),
        (context_lens - (pages - 1) * page_size).astype(np.int32),
    )


def _prefix_sums(lens: Ints) -> Ints:
    """0 and the running sum. [n + 1] int32"""
    sums = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=sums[1:])
    return sums


def table_places(page_start: Ints, columns: int) -> Ints:
    """The positions of each row's pages in a flat page table of `columns` columns. [pages] int32"""
    counts = np.diff(page_start)
    firsts = np.arange(len(counts), dtype=np.int32) * np.int32(columns) - page_start[:-1]
    places: Ints = np.arange(page_start[-1], dtype=np.int32) + np.repeat(firsts, counts)
    return places


def pad_lens(lens: Ints, rows: int) -> Ints:
    """The lengths, with rows of one token after them up to `rows`. [rows] int32"""
    rows_lens = np.ones(rows, np.int32)
    rows_lens[: len(lens)] = lens
    return rows_lens
