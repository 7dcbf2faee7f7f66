"""Drafts that the model's own layers make, behind the sampling of a bucket."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from headstock.nn.drafts import make_row_drafts
from headstock.spi import Program, Sample
from headstock_cuda_graph.capture import CapturedGraph, GraphCapturer
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
    return Bucket(
        bucket.size,
        bucket.lines,
        bucket.plan,
        bucket.forward,
        bucket.shared,
        bucket.samplers,
        graph,
    )


def keep_tokens(program: Program, bucket: Bucket) -> None:
    """Keep the tokens of a step, drafts among them, which sampling overwrites.

    writes: bucket.lines
    """
    if bucket.drafts is not None:
        bucket.lines[2].copy_(program.row_tables.read_tokens(*bucket.inputs))


def add_drafts(sample: Sample, bucket: Bucket, num_rows: int) -> Sample:
    """The sample with what makes drafts for its first rows."""
    graph = bucket.drafts
    if graph is None:
        return sample
    verified = bucket.lines[2, : len(sample.tokens)]
    return sample.with_drafts(partial(_replay, graph, num_rows), verified)


def _replay(graph: CapturedGraph[Tensor], num_rows: int) -> Tensor:
    """The drafts of the first rows."""
    graph.replay()
    return graph.result[:num_rows]


def _draft(program: Program, bucket: Bucket, query_len: int) -> Tensor:
    """The drafts behind the rows of a bucket.

    returns: [rows, k]    writes: the pools, the token table
    """
    backend = program.attention.backend if query_len == 1 else program.verify_attention
    assert backend is not None, "can_draft was asked"
    lines, hidden = bucket.lines, bucket.forward.result
    return make_row_drafts(program, backend, lines[:2], lines[2], hidden, query_len)
