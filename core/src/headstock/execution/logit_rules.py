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

FOR_EVER = np.iinfo(np.int64).max


@frozen(kw_only=True, eq=False)
class Rules:
    """What one request bans and favours.

    allowed: [n] int64, None for all ids    stops: [n] int64, banned below a length of `min_len`
    favoured: [n] int64    biases: [n] float32, added to their logits
    `until`: the length from which on none of it matters.
    """

    allowed: Ints | None
    stops: Ints
    min_len: int
    favoured: Ints
    biases: Ints
    until: int

    @classmethod
    def of(cls, request: Request, vocab: int) -> Rules:
        """The rules of `request`."""
        params: Any = request.params
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids
        stops = [id for id in request.stop_ids if id < vocab]
        min_len = len(request.prompt) + request.min_tokens if stops and request.min_tokens else 0
        return cls(
            allowed=None if allowed is None else np.array(allowed, np.int64),
            stops=np.array(stops, np.int64),
            min_len=min_len,
            favoured=np.array(list(bias.keys()), np.int64),
            biases=np.array(list(bias.values()), np.float32),
            until=FOR_EVER if bias or allowed is not None else min_len,
        )


def tables(
    rules: Sequence[tuple[int, int, Rules]], shape: tuple[int, int], buffers: Buffers
) -> dict[str, Tensor]:
    """The bans and the biases of a step, made on the device: to send whole tables there would take
    longer than a step.

    rules: logit, length of its row before the token to come, and the row's rules; at least one
    returns: banned, bias, each of `shape` [n, vocab], left out where nobody needs it
    """
    closed = [(at, each.allowed) for at, _, each in rules if each.allowed is not None]
    early = [(at, each.stops) for at, length, each in rules if length < each.min_len]
    favours = [(at, each.favoured) for at, _, each in rules]
    found = {}
    if closed or early:
        found["banned"] = banned = torch.zeros(shape, dtype=torch.bool, device=buffers.device)
        if closed:
            banned[buffers.put(np.array([at for at, _ in closed]))] = True
            banned[spots(closed, buffers)] = False
        if early:
            banned[spots(early, buffers)] = True
    biases = np.concatenate([each.biases for *_, each in rules])
    if len(biases):
        found["bias"] = bias = torch.zeros(shape, device=buffers.device)
        bias[spots(favours, buffers)] = buffers.put(biases)
    return found


def spots(ids: Sequence[tuple[int, Ints]], buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Rows and columns of a table: (row, [m] int64 columns) for each.

    returns: each [sum of m] int64
    """
    rows = np.repeat([row for row, _ in ids], [len(columns) for _, columns in ids])
    return buffers.put(rows), buffers.put(np.concatenate([columns for _, columns in ids]))
