"""From logits to tokens. A token depends on its own logits, settings, seed and position alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import evolve
from torch import Tensor

from headstock.errors import PluginBroken, shorten
from headstock.nn.noise import gumbel
from headstock.nn.penalties import apply_logit_rules_, forbid_tokens_
from headstock.nn.truncation import apply_min_p, apply_top_k_top_p
from headstock.spi import LogitsProcessor, Processing, Sample, Sampling

COLDEST = 1e-6
"""The lowest temperature that is divided by; below it, a float32 softmax is a single token."""


def sample(logits: Tensor, sampling: Sampling) -> Sample:
    """Sample one token a row.

    The order is: mask, bans, bias, penalties, processors that change the arg-max, temperature,
    other processors, min-p, top-k and top-p, Gumbel noise, arg-max.

    Temperature 0 takes the best token, the lowest id of equals. Log-probabilities are those of the
    logits as given.
    logits: [n, vocab] float32
    writes: logits
    """
    if sampling.processing is not None:
        return sample_processed(logits, sampling, sampling.processing, sample)
    # Before the rules: the log-probabilities are those of the model.
    logprobs = logits.log_softmax(-1) if sampling.top_logprobs >= 0 else None
    scores = score_tokens(logits, sampling)
    # NaN wins every maximum, so a row is healthy exactly when its maximum is a number.
    best, tokens = scores.max(-1)
    healthy = best.isfinite()
    if logprobs is None:
        return Sample(tokens=tokens, healthy=healthy)
    return attach_logprobs(tokens, healthy, logprobs, sampling)


def score_tokens(logits: Tensor, sampling: Sampling) -> Tensor:
    """Scores whose arg-max is the sampled token.

    logits, result: [n, vocab] float32
    writes: logits
    """
    processing = sampling.processing
    if processing is not None:
        plain, rows = evolve(sampling, processing=None), processing.rows
        if rows is None:
            return score_tokens(*_process_rows(logits, plain, processing))
        # Of a copy, taken before the scores of all rows are written over.
        part = score_tokens(*_process_rows(logits[rows], plain.take(rows), processing))
        return score_tokens(logits, plain).index_copy_(0, rows, part)
    apply_logit_rules_(logits, sampling)
    if sampling.temperature is None:
        return logits
    return gumbel_scores(logits, sampling.temperature, sampling)


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
    scores = divide_by_temperature(logits, temperature, highest)
    if sampling.min_p is not None:
        scores = apply_min_p(scores, sampling.min_p)
    if sampling.top_k is not None or sampling.top_p is not None:
        scores = apply_top_k_top_p(scores, sampling.top_k, sampling.top_p)
    noise = gumbel(sampling.seeds, sampling.positions, logits.shape[-1], offset)
    return noise.mul_(warm[:, None]).add_(scores)


def sample_processed(
    logits: Tensor,
    sampling: Sampling,
    processing: Processing,
    sample_plain: Callable[[Tensor, Sampling], Sample],
) -> Sample:
    """The sample of all rows, of which some are changed by logits processors.

    Every set of operations can leave processors to this function. Rows without one are sampled as
    if there were none.

    logits: [n, vocab] of any float type
    sample_plain: samples logits by settings without processing; it may write to the logits
    writes: logits
    """
    plain, rows = evolve(sampling, processing=None), processing.rows
    # A copy, taken before the sampling of all rows writes to them.
    part = logits.to(torch.float32) if rows is None else logits[rows].to(torch.float32)
    settings = plain if rows is None else plain.take(rows)
    logprobs = part.log_softmax(-1) if sampling.top_logprobs >= 0 else None
    part_sample = sample_plain(*_process_rows(part, settings, processing))
    if logprobs is not None:
        part_sample = attach_logprobs(part_sample.tokens, part_sample.healthy, logprobs, settings)
    return (
        part_sample if rows is None else _put_rows(sample_plain(logits, plain), rows, part_sample)
    )


def _process_rows(
    logits: Tensor, sampling: Sampling, processing: Processing
) -> tuple[Tensor, Sampling]:
    """Scores of rows after rules and processors, and the settings that are still to be applied.

    logits, result: [n, vocab] float32
    writes: logits
    """
    apply_logit_rules_(logits, sampling)
    scores, temperature = _apply_processors(logits, sampling, processing)
    # Once more: a processor may have moved scores to tokens that a grammar forbids.
    forbid_tokens_(scores, sampling)
    rest = {name: getattr(sampling, name) for name in _AFTER_RULES}
    return scores, Sampling(temperature=temperature, **rest)


_AFTER_RULES = ("top_k", "top_p", "min_p", "seeds", "positions")
"""The settings that matter after rules, processors and temperature."""


def _apply_processors(
    logits: Tensor, sampling: Sampling, processing: Processing
) -> tuple[Tensor, Tensor | None]:
    """What processors make of logits, and the temperature that is still to be applied.

    logits, result: [n, vocab] float32    returns: and [n] float32
    """
    temperature, at = sampling.temperature, sampling.positions
    assert at is not None
    for processor, columns in processing.parts:
        if processor.changes_argmax:
            logits = apply_processor(processor, logits, at, columns)
    others = [pair for pair in processing.parts if not pair[0].changes_argmax]
    if temperature is None or not others:
        return logits, temperature
    logits = divide_by_temperature(logits, temperature)
    for processor, columns in others:
        logits = apply_processor(processor, logits, at, columns)
    return logits, (temperature > 0).to(torch.float32)


def apply_processor(
    processor: LogitsProcessor,
    logits: Tensor,
    at: Tensor,
    columns: Mapping[str, Tensor],
) -> Tensor:
    """What one processor makes of logits.   raises: PluginBroken when that is no such tensor

    logits, result: [n, vocab] float32    at: [n] int64, as `LogitsProcessor.apply` has it
    """
    scores: object = processor.apply(logits, at, columns)
    if (
        not isinstance(scores, Tensor)
        or scores.shape != logits.shape
        or scores.dtype != logits.dtype
        or scores.device != logits.device
    ):
        result = _describe_scores(scores) if isinstance(scores, Tensor) else shorten(scores)
        kind = type(processor)
        raise PluginBroken(
            f"the logits processor {kind.__module__}.{kind.__qualname__}: expected "
            f"{_describe_scores(logits)}, got {result}; report it to its author"
        )
    return scores


def _describe_scores(scores: Tensor) -> str:
    """The type, the shape and the device of scores."""
    return f"{scores.dtype} {list(scores.shape)} on {scores.device}"


def _put_rows(whole: Sample, rows: Tensor, part: Sample) -> Sample:
    """The sample with these rows instead of its own.   rows: [m] int64"""
    values = {name: (getattr(whole, name), getattr(part, name)) for name in _SAMPLE_FIELDS}
    return Sample(
        **{
            # A row that is listed several times gets the same values each time.
            name: old.index_copy(0, rows, new)
            for name, (old, new) in values.items()
            if old is not None
        }
    )


_SAMPLE_FIELDS = ("tokens", "healthy", "logprobs", "top_ids", "top_logprobs", "ranks")


def divide_by_temperature(
    logits: Tensor, temperature: Tensor, highest: Tensor | None = None
) -> Tensor:
    """The logits less their maximum, by the temperature; by 1 where that is 0.

    logits, result: [n, vocab] float32    temperature: [n] float32
    highest: the maxima [n, 1]; those of `logits` without it
    """
    divisor = temperature.clamp(min=COLDEST).masked_fill(temperature <= 0, 1.0)
    # Less the maximum first, so that no quotient overflows upwards.
    if highest is None:
        highest = logits.amax(-1, keepdim=True)
    return (logits - highest).div_(divisor[:, None])


def join_best(best: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The best score of each row out of those of parts of the vocabulary, and its token.

    best: [parts, n], in the order of the vocabulary    tokens: [parts, n], with their offsets
    """
    # NaN wins and the first of equals does, as in a maximum over whole rows.
    score, part = best.max(0)
    return score, tokens.gather(0, part[None])[0]


def attach_logprobs(
    tokens: Tensor, healthy: Tensor, logprobs: Tensor, sampling: Sampling
) -> Sample:
    """The sample with log-probabilities and ranks of its tokens or the targets, and with the
    likeliest tokens.

    tokens: [n] int64    healthy: [n] bool    logprobs: [n, vocab] float32
    """
    targets = find_targets(tokens, sampling)
    top_logprobs, top_ids = logprobs.topk(min(sampling.top_logprobs, logprobs.shape[-1]), -1)
    return Sample(
        tokens=tokens,
        healthy=healthy,
        logprobs=logprobs.gather(-1, targets[:, None]).squeeze(-1),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        ranks=rank_tokens(logprobs, targets),
    )


def find_targets(tokens: Tensor, sampling: Sampling) -> Tensor:
    """The tokens whose log-probabilities are reported.   tokens, result: [n] int64"""
    targets = sampling.targets
    return tokens if targets is None else torch.where(targets < 0, tokens, targets)


def rank_tokens(scores: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens are as likely as each row's or likelier, itself among them.

    scores: [n, vocab], logits or log-probabilities    tokens, result: [n] int64
    """
    # Equals count, as in vLLM: so a token that is not among the k likeliest never ranks among them.
    return (scores >= scores.gather(-1, tokens[:, None])).sum(-1)
