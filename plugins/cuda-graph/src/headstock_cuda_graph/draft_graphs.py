"""Drafts that the model's own layers make, behind the sampling of a bucket."""

from __future__ import annotations

import attrs
import numpy as np
from torch import Tensor

from headstock.nn.drafts import propose_drafts
from headstock.spi import AttentionBackend, Program, Sample, StepInputs
from headstock_cuda_graph.capture import GraphCapturer
from headstock_cuda_graph.sampling_graphs import Bucket, pad_lines


def can_draft(program: Program) -> bool:
    """Whether graphs may make the drafts: their attention is planned from bounds."""
    return program.attention.takes_bounds and program.verify_attention is not None


def capture_drafts(
    program: Program, capturer: GraphCapturer, bucket: Bucket, query_len: int
) -> Bucket:
    """The bucket with a graph that makes drafts behind its rows; as it is where none is wanted.

    query_len: tokens of each of its rows
    writes: bucket.lines
    """
    if not (program.has_own_drafts and can_draft(program)):
        return bucket
    pad_lines(bucket.lines, program.row_tables.padding_row)
    graph = capturer(lambda: _draft(program, bucket, query_len), warm=False)
    return attrs.evolve(bucket, drafts=graph)


def keep_tokens(program: Program, bucket: Bucket) -> None:
    """Keep the tokens of a step, drafts among them, which sampling overwrites.

    writes: bucket.lines
    """
    if bucket.drafts is not None:
        bucket.lines[2].copy_(program.row_tables.read_tokens(*bucket.inputs))


def add_drafts(sample: Sample, bucket: Bucket, num_rows: int) -> Sample:
    """The sample with drafts for its first rows."""
    if bucket.drafts is None:
        return sample
    bucket.drafts.replay()
    return attrs.evolve(sample, drafts=bucket.drafts.result[:num_rows])


def _draft(program: Program, bucket: Bucket, query_len: int) -> Tensor:
    """The drafts behind the rows of a bucket.   returns: [rows, k]   writes: the pools"""
    tables, attention = program.row_tables, program.attention
    backend = attention.backend if query_len == 1 else program.verify_attention
    assert isinstance(backend, AttentionBackend), "can_draft was asked"
    row_ids, starts = bucket.inputs[:, ::query_len].contiguous()
    rows = StepInputs.of_rows(row_ids, starts, query_len)
    longest = np.full(len(row_ids), attention.max_seq_len, np.int32)
    plan = backend.capture_plan(tables.attention_step(rows, longest))

    def attend(q: Tensor, index: int) -> Tensor:
        out = attention.layers[index].empty_output(q)
        backend.forward(q, attention.layers[index], plan, out)
        return out

    batch = attrs.evolve(tables.batch(rows), tokens=bucket.lines[2])
    return propose_drafts(program, batch, attend, bucket.forward.result, longest)
