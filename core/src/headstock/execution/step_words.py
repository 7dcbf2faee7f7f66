"""Rows and tokens of a captured step, as words of one piece of memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from headstock.spi.arrays import Ints


def flatten_tokens(rows: Ints, starts: Ints, counts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Compute the row and the position of each token of some rows.

    rows, starts: [rows] int64    counts: [rows] tokens of each    ends: [rows] their sums
    returns: [tokens] int64, twice
    """
    return np.repeat(rows, counts), np.arange(ends[-1]) + np.repeat(
        starts - (ends - counts), counts
    )


def split_words(words: Any, int32: Any, num_rows: int, num_tokens: int) -> dict[str, Any]:
    """Split packed words into the parts of `StepInputs`, each at a multiple of 16 bytes.

    Kernels like such addresses.

    words: [n] int64, an array or a tensor, whose type of 32 bits is `int32`; its parts are views
    """
    rows, tokens = _round_up(num_rows, 2), _round_up(num_tokens, 2)
    ints = words[2 * (tokens + rows) :].view(int32)
    width = _round_up(num_rows + 1, 4)
    return {
        "token_rows": words[:num_tokens],
        "positions": words[tokens : tokens + num_tokens],
        "row_ids": words[2 * tokens : 2 * tokens + num_rows],
        "starts": words[2 * tokens + rows : 2 * tokens + rows + num_rows],
        "query_start": ints[: num_rows + 1],
        "context_lens": ints[width : width + num_rows],
    }


def count_words(num_rows: int, num_tokens: int) -> int:
    """Count the words that `split_words` splits."""
    ints = _round_up(num_rows + 1, 4) + _round_up(num_rows, 4)
    return 2 * (_round_up(num_tokens, 2) + _round_up(num_rows, 2)) + ints // 2


def _round_up(count: int, multiple: int) -> int:
    """The least multiple that is not below the count."""
    return -(-count // multiple) * multiple


def write_rows(
    words: Ints, rows: tuple[Ints, Ints, Ints], num_rows: int, num_tokens: int, padding_row: int
) -> None:
    """Write rows and their tokens, and padding behind them.

    rows: row ids, starts and stops, each [n] int64
    writes: words
    """
    row_ids, starts, stops = rows
    count, counts = len(row_ids), stops - starts
    ends = counts.cumsum()
    total = int(ends[-1])
    token_rows, positions = flatten_tokens(row_ids, starts, counts, ends)
    parts = split_words(words, np.int32, num_rows, num_tokens)
    for name, values, filler in (
        ("token_rows", token_rows, padding_row),
        ("positions", positions, 0),
        ("row_ids", row_ids, padding_row),
        ("starts", starts, 0),
        ("context_lens", stops, 1),
    ):
        part = parts[name]
        part[: len(values)] = values
        part[len(values) :] = filler
    query_start = parts["query_start"]
    query_start[0], query_start[1 : count + 1], query_start[count + 1 :] = 0, ends, total
