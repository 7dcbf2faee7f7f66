"""Which tokens of a step a gated delta rule takes one by one, and which in chunks."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import Batch, DeltaRule

CHUNK = DeltaRule.chunk
"""Tokens of a chunk, which begins at a position that is a multiple of it."""


@frozen(eq=False)
class TokenUpdate:
    """Some tokens, and the rows whose memories they change.

    rows: [n] int64, n for one at a time in several rows, and 1 for a chunk; as many as the step has
        rows for nobody's memory
    sources: int64, the tokens: [n] or [CHUNK]; any token where nobody's is meant
    targets: as `sources`, where results go; as many as the step has tokens for nobody's
    """

    rows: Tensor
    sources: Tensor
    targets: Tensor


@frozen(eq=False)
class TokenSpans:
    """How a step's rows go through their tokens: `heads`, then `chunks`, then `tails`.

    A chunk has all tokens from a multiple of `CHUNK` up to the next one. A row's tokens that come
    before its first chunk in the step or fill none are taken one by one.

    is_first: [n] bool, rows whose memory is another sequence's
    heads, tails: one token of each row that has one left, entry by entry; empty where each row
        of the step has one token and nothing has to be looked for
    chunks: those of a row in their order
    """

    is_first: Tensor
    heads: tuple[TokenUpdate, ...] = ()
    chunks: tuple[TokenUpdate, ...] = ()
    tails: tuple[TokenUpdate, ...] = ()
    is_decode: bool = False

    @classmethod
    def of(cls, batch: Batch, *, may_read: bool) -> TokenSpans:
        """Those of a step.

        may_read: whether the batch's numbers may be read, which waits for a device. Otherwise there
            are as many entries as the step's sizes allow, some of them for nobody
        """
        num_rows, num_tokens = len(batch.starts), len(batch.tokens)
        is_first = batch.starts == 0
        if batch.max_query_len == 1 and num_rows == num_tokens and batch.saved_tokens is None:
            return cls(is_first, is_decode=True)
        firsts, counts = batch.query_start[:-1].long(), batch.query_start.diff().long()
        heads = torch.minimum(counts, -batch.starts % CHUNK)
        chunks = (counts - heads) // CHUNK
        tails = counts - heads - CHUNK * chunks
        behind = firsts + heads + CHUNK * chunks
        if may_read:
            return cls(
                is_first,
                _list_present(firsts, heads),
                _list_chunks(firsts + heads, chunks, int(chunks.sum()), num_tokens),
                _list_present(behind, tails),
            )
        longest = min(batch.max_query_len, CHUNK - 1)
        return cls(
            is_first,
            _list_possible(firsts, heads, longest, num_tokens),
            _list_chunks(firsts + heads, chunks, num_tokens // CHUNK, num_tokens),
            _list_possible(behind, tails, longest, num_tokens),
        )


def _list_present(firsts: Tensor, counts: Tensor) -> tuple[TokenUpdate, ...]:
    """One token at a time of the rows that have one left: beside a prompt others soon have none.

    firsts, counts: [rows] int64, each row's first token and how many it has
    """
    updates = []
    for index in range(int(counts.max())):
        rows = (counts > index).nonzero().flatten()
        tokens = firsts[rows] + index
        updates.append(TokenUpdate(rows, tokens, tokens))
    return tuple(updates)


def _list_possible(
    firsts: Tensor, counts: Tensor, longest: int, num_tokens: int
) -> tuple[TokenUpdate, ...]:
    """One token of every row at a time.

    firsts, counts: [rows] int64, each row's first token and how many it has
    longest: an upper bound of counts
    """
    index = torch.arange(longest, device=firsts.device)[:, None]
    is_there, tokens = counts > index, firsts + index
    rows = torch.arange(len(firsts), device=firsts.device).expand_as(tokens)
    return tuple(
        TokenUpdate(*each)
        for each in zip(
            torch.where(is_there, rows, len(firsts)),
            torch.where(is_there, tokens, 0),
            torch.where(is_there, tokens, num_tokens),
            strict=True,
        )
    )


def _list_chunks(
    firsts: Tensor, counts: Tensor, most: int, num_tokens: int
) -> tuple[TokenUpdate, ...]:
    """The chunks of one row after those of another.

    firsts, counts: [rows] int64, the first token of each row's chunks and how many it has
    most: an upper bound of the sum of counts
    """
    ends = counts.cumsum(0)
    index = torch.arange(most, device=firsts.device)
    rows = torch.searchsorted(ends, index, right=True)
    real = rows.clamp(max=len(firsts) - 1)
    within = torch.arange(CHUNK, device=firsts.device)
    tokens = (firsts[real] + CHUNK * (index - ends[real] + counts[real]))[:, None] + within
    is_there = (rows < len(firsts))[:, None]
    return tuple(
        TokenUpdate(*each)
        for each in zip(
            rows[:, None],
            torch.where(is_there, tokens, within),
            torch.where(is_there, tokens, num_tokens),
            strict=True,
        )
    )
