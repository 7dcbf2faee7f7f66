"""Tokens that requests ban and favour, and their tables for a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.scheduler import Request
from headstock.spi.arrays import Ints

if TYPE_CHECKING:
    from headstock.execution.buffers import Buffers

NO_END = np.iinfo(np.int64).max


@frozen(kw_only=True, eq=False)
class LogitRules:
    """What one request bans and favours.

    allowed: [n] int64, None for all ids    stops: [n] int64, banned below a length of `min_len`
    biased_ids: [n] int64    biases: [n] float32, added to their logits
    `end_len`: the length from which on none of it matters.
    """

    allowed: Ints | None
    stop_ids: Ints
    min_len: int
    biased_ids: Ints
    biases: Ints
    end_len: int

    @classmethod
    def from_request(cls, request: Request, vocab: int) -> LogitRules:
        """The rules of `request`."""
        params: Any = request.params
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids
        stops = [id for id in request.stop_ids if id < vocab]
        min_len = len(request.prompt) + request.min_tokens if stops and request.min_tokens else 0
        return cls(
            allowed=None if allowed is None else np.array(allowed, np.int64),
            stop_ids=np.array(stops, np.int64),
            min_len=min_len,
            biased_ids=np.array(list(bias.keys()), np.int64),
            biases=np.array(list(bias.values()), np.float32),
            end_len=NO_END if bias or allowed is not None else min_len,
        )


def make_logit_tables(
    rules: Sequence[tuple[int, int, LogitRules]], shape: tuple[int, int], buffers: Buffers
) -> dict[str, Tensor]:
    """The bans and the biases of a step, made on the device: to send whole tables there would take
    longer than a step.

    rules: logit, length of its row before the token to come, and the row's rules; at least one
    returns: banned, bias, each of `shape` [n, vocab], left out where nobody needs it
    """
    closed = [(at, each.allowed) for at, _, each in rules if each.allowed is not None]
    early = [(at, each.stop_ids) for at, length, each in rules if length < each.min_len]
    favours = [(at, each.biased_ids) for at, _, each in rules]
    found = {}
    if closed or early:
        found["banned"] = banned = torch.zeros(shape, dtype=torch.bool, device=buffers.device)
        if closed:
            banned[buffers.to_device(np.array([at for at, _ in closed]))] = True
            banned[_table_indices(closed, buffers)] = False
        if early:
            banned[_table_indices(early, buffers)] = True
    biases = np.concatenate([each.biases for *_, each in rules])
    if len(biases):
        found["bias"] = bias = torch.zeros(shape, device=buffers.device)
        bias[_table_indices(favours, buffers)] = buffers.to_device(biases)
    return found


def _table_indices(ids: Sequence[tuple[int, Ints]], buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Rows and columns of a table: (row, [m] int64 columns) for each.

    returns: each [sum of m] int64
    """
    rows = np.repeat([row for row, _ in ids], [len(columns) for _, columns in ids])
    return buffers.to_device(rows), buffers.to_device(
        np.concatenate([columns for _, columns in ids])
    )
