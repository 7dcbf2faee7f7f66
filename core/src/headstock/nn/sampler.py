"""From logits to tokens. A token depends on its own logits, settings, seed and position alone."""

from __future__ import annotations

import torch
from torch import Tensor

from headstock.nn.noise import gumbel
from headstock.nn.penalties import apply_logit_rules_
from headstock.nn.truncation import apply_min_p, apply_top_k_top_p
from headstock.spi import Sample, Sampling

COLDEST = 1e-6
"""The lowest temperature that is divided by; below it, a float32 softmax is a single token."""


def sample(logits: Tensor, sampling: Sampling) -> Sample:
    """Sample one token a row.

    The order is: bans, bias, penalties, temperature, min-p, top-k and top-p, Gumbel noise, arg-max.

    Temperature 0 takes the best token, the lowest id of equals. Log-probabilities are those of the
    logits as given.
    logits: [n, vocab] float32
    writes: logits
    """
    # Before the rules: the log-probabilities are those of the model.
    logprobs = logits.log_softmax(-1) if sampling.top_logprobs >= 0 else None
    apply_logit_rules_(logits, sampling)
    scores = (
        logits
        if sampling.temperature is None
        else gumbel_scores(logits, sampling.temperature, sampling)
    )
    # NaN wins every maximum, so a row is healthy exactly when its maximum is a number.
    best, tokens = scores.max(-1)
    healthy = best.isfinite()
    if logprobs is None:
        return Sample(tokens=tokens, healthy=healthy)
    return attach_logprobs(tokens, healthy, logprobs, sampling)


def gumbel_scores(
    logits: Tensor,
    temperature: Tensor,
    sampling: Sampling,
    *,
    offset: int = 0,
    highest: Tensor | None = None,
) -> Tensor:
    """Scores whose arg-max samples at the row's temperature; at 0 the logits less their maximum.

    logits, result: [n, vocab] float32    temperature: [n] float32
    offset, highest: for logits of a part of the vocabulary, its first token id and the maxima
        [n, 1] of whole rows. Truncation needs whole rows.
    """
    assert sampling.seeds is not None
    assert sampling.positions is not None
    warm = temperature > 0
    divisor = temperature.clamp(min=COLDEST).masked_fill(~warm, 1.0)
    # Less the maximum first, so that no quotient overflows upwards.
    if highest is None:
        highest = logits.amax(-1, keepdim=True)
    scores = (logits - highest).div_(divisor[:, None])
    if sampling.min_p is not None:
        scores = apply_min_p(scores, sampling.min_p)
    if sampling.top_k is not None or sampling.top_p is not None:
        scores = apply_top_k_top_p(scores, sampling.top_k, sampling.top_p)
    noise = gumbel(sampling.seeds, sampling.positions, logits.shape[-1], offset)
    return noise.mul_(warm[:, None]).add_(scores)


def join_best(best: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The best score of each row out of those of parts of the vocabulary, and its token.

    best: [parts, n], in the order of the vocabulary    tokens: [parts, n], with their offsets
    """
    # NaN wins and the first of equals does, as in a maximum over whole rows.
    found, part = best.max(0)
    return found, tokens.gather(0, part[None])[0]


def attach_logprobs(
    tokens: Tensor, healthy: Tensor, logprobs: Tensor, sampling: Sampling
) -> Sample:
    """The sample with log-probabilities of its tokens or the targets, and of the likeliest tokens.

    tokens: [n] int64    healthy: [n] bool    logprobs: [n, vocab] float32
    """
    targets = (
        tokens
        if sampling.targets is None
        else torch.where(sampling.targets < 0, tokens, sampling.targets)
    )
    top_logprobs, top_ids = logprobs.topk(min(sampling.top_logprobs, logprobs.shape[-1]), -1)
    return Sample(
        tokens=tokens,
        healthy=healthy,
        logprobs=logprobs.gather(-1, targets[:, None]).squeeze(-1),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
