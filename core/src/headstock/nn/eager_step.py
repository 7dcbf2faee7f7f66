"""A step run operation by operation: what runners do with a step that they cannot replay."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from headstock.nn.drafts import make_drafts
from headstock.nn.pooling import pool_hidden
from headstock.nn.sampler import find_targets, rank_tokens
from headstock.spi import Batch, Program, Sample, Sampling, Step


def run_eager_step(program: Program, step: Step) -> Sample:
    """What the step's scored tokens sample.   writes: the pools, the token table"""
    if step.is_decode:
        # Beside prompts two more calls of attention a layer would take longer than they spare
        # (docs/decisions/0019-shared-prefixes.md).
        step = step.grouped()
    batch, attend_into, layers = step.batch(), step.attention(), program.attention.layers

    def attend(q: Tensor, layer: int) -> Tensor:
        out = layers[layer].empty_output(q)
        attend_into(q, layer, out)
        return out

    hidden = program.model.forward(program.params, program.config, batch, attend, program.ops)
    sample = _score_step(program, hidden, batch, step)
    if batch.pooling is not None:
        sample = attrs.evolve(sample, pooled=pool_hidden(hidden, batch, batch.pooling))
    rows, positions, scored = step.list_stored()
    if len(rows):
        program.row_tables.keep(rows, positions, sample, scored)
    if program.has_own_drafts:
        kept = np.where(step.is_sampled, step.row_ids, program.row_tables.padding_row)
        at = slice(None) if batch.logit_indices is None else batch.logit_indices
        make = partial(make_drafts, program, batch, attend, hidden, step.stops, kept)
        sample = sample.with_drafts(make, batch.tokens[at])
    return sample if step.order is None else attrs.evolve(sample, order=step.order)


def _score_step(program: Program, hidden: Tensor, batch: Batch, step: Step) -> Sample:
    """What the step's scored tokens sample; there may be none of them where rows pool."""
    # Before the head: most tokens of a prompt need no logits.
    if batch.logit_indices is not None:
        hidden = hidden[batch.logit_indices]
    # Operations need not serve a batch of nothing.
    if not len(hidden):
        tokens = torch.zeros(0, dtype=torch.int64, device=hidden.device)
        return Sample(tokens=tokens, healthy=tokens.bool())
    return score_and_sample(program, hidden, step.sampling())


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
        sample = ops.lm_head_sample(hidden, sampling)
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
        logits = ops.lm_head(hidden)
    else:
        logits = program.model.logits(params, config, hidden, ops)
    return rank_tokens(logits, find_targets(tokens, sampling))


def _concat_samples(samples: list[Sample]) -> Sample:
    """The samples end to end."""

    columns = {
        field.name: [getattr(sample, field.name) for sample in samples]
        for field in attrs.fields(Sample)
        if field.name not in ("order", "make_drafts", "is_replayed")
    }
    joined: dict[str, Any] = {
        name: torch.cat(tensors) for name, tensors in columns.items() if tensors[0] is not None
    }
    return Sample(**joined)
