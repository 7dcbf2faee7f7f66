"""Tokens that requests ban or bias, and their tables for a step."""

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
    """The tokens that one request bans or biases.

    allowed: [n] int64, None for all ids
    stop_ids: [n] int64, banned while the row is shorter than `min_len`
    biased_ids: [n] int64
    biases: [n] float32, added to the logits of `biased_ids`
    end_len: the length of the row from which on none of this matters; 0 when nothing does
    """

    allowed: Ints | None
    stop_ids: Ints
    min_len: int
    biased_ids: Ints
    biases: Ints
    end_len: int

    @classmethod
    def from_request(cls, request: Request, vocab: int) -> LogitRules:
        """Make the rules of `request`."""
        params: Any = request.params
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids
        # A tokenizer may have more ids than the model has logits. On a GPU such an index would end
        # in a device assertion, after which no CUDA call of this process works.
        stop_ids = [id for id in request.stop_ids if id < vocab]
        min_len = len(request.prompt) + request.min_tokens if stop_ids and request.min_tokens else 0
        return cls(
            allowed=None if allowed is None else np.array(allowed, np.int64),
            stop_ids=np.array(stop_ids, np.int64),
            min_len=min_len,
            biased_ids=np.array(list(bias.keys()), np.int64),
            biases=np.array(list(bias.values()), np.float32),
            end_len=NO_END if bias or allowed is not None else min_len,
        )


def make_logit_tables(
    rules: Sequence[tuple[int, int, LogitRules]], shape: tuple[int, int], buffers: Buffers
) -> dict[str, Tensor]:
    """Make the bans and biases of a step, on the device.

    To upload whole tables would take longer than a step, so only the ids are uploaded.

    rules: logit, length of its row before the sampled token, and the row's rules; at least one
    returns: banned, bias, each of `shape` [n, vocab], left out where no row needs it
    """
    allowed = [(at, rule.allowed) for at, _, rule in rules if rule.allowed is not None]
    early = [(at, rule.stop_ids) for at, length, rule in rules if length < rule.min_len]
    biased = [(at, rule.biased_ids) for at, _, rule in rules]
    tables = {}
    if allowed or early:
        tables["banned"] = banned = torch.zeros(shape, dtype=torch.bool, device=buffers.device)
        if allowed:
            banned[buffers.to_device(np.array([at for at, _ in allowed]))] = True
            banned[_table_indices(allowed, buffers)] = False
        # After the allowed ids: a stop id stays banned while the row is short, even if it is
        # allowed.
        if early:
            banned[_table_indices(early, buffers)] = True
    biases = np.concatenate([rule.biases for *_, rule in rules])
    if len(biases):
        tables["bias"] = bias = torch.zeros(shape, device=buffers.device)
        bias[_table_indices(biased, buffers)] = buffers.to_device(biases)
    return tables


def _table_indices(ids: Sequence[tuple[int, Ints]], buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Flatten pairs of a row and its columns, [m] int64, to the indices of a table.

    returns: each [sum of m] int64
    """
    rows = np.repeat([row for row, _ in ids], [len(columns) for _, columns in ids])
    return buffers.to_device(rows), buffers.to_device(
        np.concatenate([columns for _, columns in ids])
    )
