"""A step run operation by operation: what runners do with a batch that they cannot replay."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from headstock.nn.pooling import pool_hidden
from headstock.nn.sampler import find_targets, rank_tokens
from headstock.spi import Attend, Batch, Program, Sample, Sampling


def run_eager_step(program: Program, batch: Batch, attend: Attend) -> Sample:
    """What the batch's logit positions sample.   writes: batch.pools"""
    hidden = program.model.forward(program.params, program.config, batch, attend, program.ops)
    if batch.pooling is not None:
        pooled = pool_hidden(hidden, batch, batch.pooling)
        return attrs.evolve(_score_batch(program, hidden, batch), pooled=pooled)
    return _score_batch(program, hidden, batch)


def _score_batch(program: Program, hidden: Tensor, batch: Batch) -> Sample:
    """What the batch's logit positions sample; there may be none of them where rows pool."""
    # Before the head: most tokens of a prompt need no logits.
    if batch.logit_indices is not None:
        hidden = hidden[batch.logit_indices]
    # Operations need not serve a batch of nothing.
    if not len(hidden):
        tokens = torch.zeros(0, dtype=torch.int64, device=hidden.device)
        return Sample(tokens=tokens, healthy=tokens.bool())
    return score_and_sample(program, hidden, batch.sampling)


def score_and_sample(program: Program, hidden: Tensor, sampling: Sampling) -> Sample:
    """What `hidden` [n, hidden] samples, at most `program.max_logits` positions at a time.

    The logits of a long prompt, each of whose tokens is scored, would take gigabytes at once.
    """
    most = program.max_logits
    if len(hidden) <= most:
        return _sample_hidden(program, hidden, sampling)
    starts = range(0, len(hidden), most)
    return _concat_samples(
        [
            _sample_hidden(
                program,
                hidden[start : start + most],
                sampling.part(start, start + most),
            )
            for start in starts
        ]
    )


def _sample_hidden(program: Program, hidden: Tensor, sampling: Sampling) -> Sample:
    """What `hidden` [n, hidden] samples, by the family's own scores if it makes any."""
    ops = program.ops
    if program.model.logits is None:
        sample = ops.lm_head_sample(program.params, program.config, hidden, sampling)
    else:
        logits = program.model.logits(program.params, program.config, hidden, ops)
        sample = ops.sample(logits, sampling)
    if not isinstance(sample, Sample) or sample.logprobs is None or sample.ranks is not None:
        return sample
    return attrs.evolve(sample, ranks=_rank_anew(program, hidden, sampling, sample.tokens))


def _rank_anew(program: Program, hidden: Tensor, sampling: Sampling, tokens: Tensor) -> Tensor:
    """The ranks [n] of the reported tokens, for operations that gave none."""
    # The scores once more: the operations may have written to those that they sampled from.
    params, config, ops = program.params, program.config, program.ops
    if program.model.logits is None:
        logits = ops.lm_head(params, config, hidden)
    else:
        logits = program.model.logits(params, config, hidden, ops)
    return rank_tokens(logits, find_targets(tokens, sampling))


def _concat_samples(samples: list[Sample]) -> Sample:
    """The samples end to end."""

    columns = {
        name: [getattr(sample, name) for sample in samples] for name in attrs.fields_dict(Sample)
    }
    return Sample(
        **{name: torch.cat(tensors) for name, tensors in columns.items() if tensors[0] is not None}
    )
