"""Rules on logits: masks, bans, biases, and penalties on tokens that a request has already seen.

The repetition penalty is that of Keskar et al. 2019 (arXiv 1909.05858).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headstock.spi import Sampling


def apply_logit_rules_(logits: Tensor, sampling: Sampling) -> None:
    """Apply mask, bans, biases and penalties, in this order, as far as they are not None.

    Repetition counts prompt and output, the other penalties output alone.

    writes: logits [n, vocab] float32
    """
    forbid_tokens_(logits, sampling)
    if sampling.bias is not None:
        logits.add_(sampling.bias)
    if sampling.repetition is sampling.presence is sampling.frequency is None:
        return
    seen, counts = token_counts(logits, sampling)
    if sampling.repetition is not None:
        factor = sampling.repetition[:, None].expand_as(logits).masked_fill(~seen, 1.0)
        logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    if sampling.frequency is not None:
        logits.sub_(sampling.frequency[:, None] * counts)
    if sampling.presence is not None:
        logits.sub_(sampling.presence[:, None] * (counts > 0))


def forbid_tokens_(logits: Tensor, sampling: Sampling) -> None:
    """Apply mask and bans, as far as they are not None.   writes: logits [n, vocab] float32"""
    if sampling.mask is not None:
        logits.masked_fill_(_unpack_banned(sampling.mask, logits.shape[1]), -math.inf)
    if sampling.banned is not None:
        logits.masked_fill_(sampling.banned, -math.inf)


def token_counts(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Which tokens a row's history holds, and how often its output part does.

    returns: seen [n, vocab] bool, counts [n, vocab] float32
    """
    assert sampling.history is not None
    assert sampling.history_lens is not None
    assert sampling.prompt_lens is not None
    position = torch.arange(sampling.history.shape[1], device=logits.device)
    is_token = position < sampling.history_lens[:, None]
    output = is_token & (position >= sampling.prompt_lens[:, None])
    # Padding needs some index: it is added to token 0 with weight 0.
    tokens = sampling.history.masked_fill(~is_token, 0)
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, is_token.to(logits.dtype)) > 0
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, output.to(logits.dtype))
    return seen, counts


def _unpack_banned(mask: Tensor, vocab: int) -> Tensor:
    """The tokens that a mask does not allow.

    mask: [n, words] int32, as `Sampling.mask`    returns: [n, vocab] bool
    """
    # By bytes and a table: to shift each word by 0 to 31 would take eight times the memory.
    values = torch.arange(256, device=mask.device, dtype=torch.int32)[:, None]
    table = (values >> torch.arange(8, device=mask.device, dtype=torch.int32)) & 1 == 0
    places = mask.contiguous().view(torch.uint8).flatten().int()
    return table.index_select(0, places).view(len(mask), -1)[:, :vocab]
