"""Sampling by all ranks together, each from its own part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve
from torch import Tensor

from headstock.nn.penalties import apply_logit_rules_
from headstock.nn.sampler import gumbel_scores, join_best
from headstock.spi import ModelConfig, Sample, Sampling

WORD = 32
"""Tokens in a word of a mask. Parts of the vocabulary have whole words."""

_OF_WHOLE_ROWS = (
    "top_k",
    "top_p",
    "min_p",
    "repetition",
    "presence",
    "frequency",
    "processing",
    "targets",
)


def needs_whole_rows(sampling: Sampling) -> bool:
    """Whether a token depends on more than the best score of each part of the vocabulary."""
    return sampling.top_logprobs >= 0 or any(
        getattr(sampling, name) is not None for name in _OF_WHOLE_ROWS
    )


def find_own_tokens(config: ModelConfig) -> range:
    """The token ids whose scores a rank computes; its part may be padded beyond them."""
    first, full = config.shard.index * config.vocab, config.full_vocab
    return range(min(first, full), min(first + config.vocab, full))


def take_own_rules(sampling: Sampling, tokens: range) -> Sampling:
    """The settings with bans and biases of these tokens alone; masks are of these already."""
    span = slice(tokens.start, tokens.stop)
    return evolve(
        sampling,
        banned=None if sampling.banned is None else sampling.banned[:, span],
        bias=None if sampling.bias is None else sampling.bias[:, span],
    )


def gather_mask(
    sampling: Sampling, config: ModelConfig, all_gather: Callable[[Tensor], Tensor]
) -> Sampling:
    """The settings with masks of whole rows, of which each rank has its part."""
    if sampling.mask is None or config.shard.count == 1:
        return sampling
    words = -(-config.full_vocab // WORD)
    return evolve(sampling, mask=all_gather(sampling.mask)[:, :words])


def sample_shard(
    logits: Tensor, sampling: Sampling, config: ModelConfig, all_gather: Callable[[Tensor], Tensor]
) -> Sample:
    """The tokens that `headstock.nn.sampler.sample` takes from the rows of all ranks.

    logits: [n, config.vocab] float32, this rank's part of each row
    sampling: with masks of this part; for which `needs_whole_rows` does not hold
    all_gather: that of the ranks
    writes: logits
    """
    tokens = find_own_tokens(config)
    apply_logit_rules_(logits[:, : len(tokens)], take_own_rules(sampling, tokens))
    logits[:, len(tokens) :] = -torch.inf
    scores = logits
    if sampling.temperature is not None:
        # The maxima of whole rows, so that each score is rounded as on one rank.
        highest = all_gather(logits.amax(-1, keepdim=True)).amax(-1, keepdim=True)
        scores = gumbel_scores(
            logits, sampling.temperature, sampling, offset=tokens.start, highest=highest
        )
    best, at = scores.max(-1)
    # As integers, of which no bit changes on the way.
    pairs = torch.stack((best.view(torch.int32), (at + tokens.start).int()), -1)
    joined = all_gather(pairs).reshape(len(logits), -1, 2)
    score, chosen = join_best(
        joined[..., 0].view(torch.float32).t(), joined[..., 1].t().to(torch.int64)
    )
    return Sample(tokens=chosen, healthy=score.isfinite())
