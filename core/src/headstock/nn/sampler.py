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


def gumbel_scores(logits: Tensor, temperature: Tensor, sampling: Sampling) -> Tensor:
    """Scores whose arg-max samples at the row's temperature; at 0 the logits less their maximum.

    logits, result: [n, vocab] float32    temperature: [n] float32
    """
    assert sampling.seeds is not None
    assert sampling.positions is not None
    warm = temperature > 0
    divisor = temperature.clamp(min=COLDEST).masked_fill(~warm, 1.0)
    # Less the maximum first, so that no quotient overflows upwards.
    scores = (logits - logits.amax(-1, keepdim=True)).div_(divisor[:, None])
    if sampling.min_p is not None:
        scores = apply_min_p(scores, sampling.min_p)
    if sampling.top_k is not None or sampling.top_p is not None:
        scores = apply_top_k_top_p(scores, sampling.top_k, sampling.top_p)
    noise = gumbel(sampling.seeds, sampling.positions, logits.shape[-1])
    return noise.mul_(warm[:, None]).add_(scores)


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
