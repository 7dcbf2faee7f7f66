"""The plan of one step, as flat arrays."""

from __future__ import annotations

import struct
from operator import attrgetter
from typing import Any

import numpy as np
from attrs import fields, frozen

from headstock.scheduler.row_counters import NONE
from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False, slots=False)  # filled faster than with slots
class Plan:
    """The plan of one step; with the token table, all that a device process needs.

    All arrays are int32:

    number: of the step
    num_decode: rows at the front that compute one position each, after earlier ones
    rows, admission_ids: [n] rows in batch order (decode rows first) and their admission ids
    starts, stops: [n] the half-open interval of token positions that each row computes
    num_logits: [n] how many of the last positions get logits: 1, k + 1 to verify k drafts, or the
        whole chunk; 0 where the row pools
    samples: [n] 1 where the row samples a token at its last position
    num_drafts: [n] how many of the row's last positions hold drafts; empty when no row has any
    pooling: [n] 1 where the row's hidden states are pooled, 2 where its prompt ends here too; empty
        when no row pools
    drafts: [sum of num_drafts] the drafts, row by row, to put into the token table before the step;
        -1 for those that the device has there
    page_groups, page_rows, page_columns, page_numbers: [m] page-table entries to write, in order
    new_row_ids: rows that got a request in this step
    copies: [m, 3] pages to copy before the step (group, source, destination): states that rows
        begin with, or leave to others. All sources are read before any destination is written.
    saves: [m, 4] pages to which the step also writes a row's state behind some of its tokens
        (group, row, number of the sequence's tokens, page), in one order in each group
    """

    number: int
    num_decode: int
    rows: Ints
    admission_ids: Ints
    starts: Ints
    stops: Ints
    num_logits: Ints
    samples: Ints
    num_drafts: Ints = NONE
    drafts: Ints = NONE
    pooling: Ints = NONE
    page_groups: Ints = NONE
    page_rows: Ints = NONE
    page_columns: Ints = NONE
    page_numbers: Ints = NONE
    new_row_ids: Ints = NONE
    copies: Ints = NONE
    saves: Ints = NONE

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return int((self.stops - self.starts).sum())

    @property
    def last_logits(self) -> Ints:
        """Where each row's last logit is among the step's logits, [n] int64."""
        return np.cumsum(self.num_logits, dtype=np.int64) - 1

    @property
    def pooled_rows(self) -> Ints:
        """Which of the plan's rows pool, [pooled] int64."""
        return self.pooling.nonzero()[0]

    @property
    def keeps_single(self) -> np.ndarray:
        """Which of the plan's rows compute one token, and sample the next, [n] bool."""
        is_single: np.ndarray = (self.samples > 0) & (self.stops - self.starts == 1)
        return is_single

    @property
    def draft_places(self) -> tuple[Ints, Ints]:
        """The row and the position of each draft, [sum of num_drafts] int64 each."""
        ends = np.cumsum(self.num_drafts)
        firsts = np.repeat(self.stops - self.num_drafts - (ends - self.num_drafts), self.num_drafts)
        rows = np.repeat(self.rows.astype(np.int64), self.num_drafts)
        return rows, firsts.astype(np.int64) + np.arange(len(rows))

    def encode(self) -> bytes:
        """Return the plan as bytes, which hold no code.

        They are `number` and `num_decode`, the length of each array, then the arrays.
        """
        # For each step of several ranks: 8 us, where copies of the arrays took 15.
        arrays: list[Any] = [np.ascontiguousarray(each, np.int32) for each in _get_arrays(self)]
        return b"".join(
            (_HEAD.pack(self.number, self.num_decode, *(a.size for a in arrays)), *arrays)
        )

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        """Return the plan of these bytes.

        raises: ValueError when the lengths do not fit the data
        """
        head_len = (2 + len(_ARRAYS)) * 8
        head = np.frombuffer(data[:head_len], np.int64)
        sizes = head[2:]
        if (
            len(sizes) != len(_ARRAYS)
            or (sizes < 0).any()
            or head_len + 4 * int(sizes.sum()) != len(data)
        ):
            raise ValueError(f"{len(data)} bytes are not an encoded plan")
        body = np.frombuffer(data[head_len:], np.int32)
        parts = dict(zip(_ARRAYS, np.split(body, np.cumsum(sizes)[:-1]), strict=True))
        for name, width in (("copies", 3), ("saves", 4)):
            parts[name] = parts[name].reshape(-1, width) if len(parts[name]) else parts[name]
        return cls(number=int(head[0]), num_decode=int(head[1]), **parts)


_ARRAYS = tuple(f.name for f in fields(Plan))[2:]
"""The names of a plan's arrays, in the order they are encoded."""
_get_arrays = attrgetter(*_ARRAYS)
_HEAD = struct.Struct(f"={2 + len(_ARRAYS)}q")
