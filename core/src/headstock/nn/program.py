"""Running a program operation by operation: what every runner does for batches that it has nothing
better for.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from headstock.spi import Attend, Batch, Program, Sample, Sampling


def run(program: Program, batch: Batch, attend: Attend) -> Sample:
    """What the batch's logit positions sample.   writes: batch.pools"""
    hidden = program.model.forward(program.params, program.config, batch, attend, program.ops)
    if batch.logit_indices is not None:
        hidden = hidden[batch.logit_indices]
    return score(program, hidden, batch.sampling)


def score(program: Program, hidden: Tensor, sampling: Sampling) -> Sample:
    """What `hidden` [n, hidden] samples, `program.max_logits` positions at a time: a prompt whose
    every token is scored would need gigabytes of logits at once.
    """
    most = program.max_logits
    if len(hidden) <= most:
        return program.ops.lm_head_sample(program.params, program.config, hidden, sampling)
    starts = range(0, len(hidden), most)
    return joined(
        [
            program.ops.lm_head_sample(
                program.params,
                program.config,
                hidden[start : start + most],
                part(sampling, start, start + most),
            )
            for start in starts
        ]
    )


def part(sampling: Sampling, start: int, stop: int) -> Sampling:
    """The settings of some of the positions."""
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in attrs.fields_dict(Sampling)}
    fields |= {name: each[start:stop] for name, each in fields.items() if isinstance(each, Tensor)}
    return Sampling(**fields)


def joined(samples: list[Sample]) -> Sample:
    """The samples end to end."""

    columns = {
        name: [getattr(sample, name) for sample in samples] for name in attrs.fields_dict(Sample)
    }
    return Sample(
        **{name: torch.cat(tensors) for name, tensors in columns.items() if tensors[0] is not None}
    )
