"""Cut a step in two where rows that decode share leading pages."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from headstock.execution.buffers import Buffers
from headstock.scheduler.row_counters import read_only
from headstock.spi import MAX_PREFIX_GROUPS, AttentionStep, Phase, PrefixGroups, SharedPrefixes
from headstock.spi.arrays import Ints


@frozen(kw_only=True, eq=False)
class HostPrefixes:
    """What the host knows of shared prefixes: their lengths, or in a capture the most they may be.

    query_lens: [groups] int32, the rows of each group
    context_lens: [groups] int32, the tokens that each group's rows share
    rest_lens: [rows] int32, the tokens of each row that follow, its newest one included
    """

    query_lens: Ints
    context_lens: Ints
    rest_lens: Ints


def split_step(
    step: AttentionStep,
    group_starts: Tensor,
    shared_lens: Tensor,
    host: HostPrefixes,
    page_size: int,
) -> AttentionStep:
    """Return the step with `shared`. A graph may capture it: it never reads the device.

    Rows of groups have one query token each and are the first of the step.

    group_starts: [groups + 1] int32, where the rows of each group begin in the step
    shared_lens: [rows] int32, multiples of `page_size`; 0 for rows of no group
    """
    # A group's pages are the leading ones of any row of it. A group without rows has no queries, so
    # that it reads no page; it may begin where the rows end.
    firsts = group_starts[:-1].clamp(max=step.num_rows - 1)
    num_pages = (shared_lens // page_size)[:, None]
    prefixes = AttentionStep(
        phase=Phase.EXTEND,
        query_start=group_starts,
        context_lens=shared_lens.index_select(0, firsts),
        page_tables=tuple(table.index_select(0, firsts) for table in step.page_tables),
        host_query_lens=host.query_lens,
        host_context_lens=host.context_lens,
    )
    rest = AttentionStep(
        phase=step.phase,
        query_start=step.query_start,
        context_lens=step.context_lens - shared_lens,
        page_tables=tuple(_drop_leading(table, num_pages) for table in step.page_tables),
        host_query_lens=step.host_query_lens,
        host_context_lens=host.rest_lens,
    )
    return evolve(
        step, shared=SharedPrefixes(prefixes=prefixes, rest=rest, shared_lens=shared_lens)
    )


def _drop_leading(table: Tensor, num_pages: Tensor) -> Tensor:
    """Return the page table without each row's leading pages.

    Columns past the end repeat the last one, which no length reaches.

    table: [rows, columns] int32    num_pages: [rows, 1] int32
    """
    columns = table.shape[1]
    at = torch.arange(columns, device=table.device) + num_pages
    return table.gather(1, at.clamp_(max=columns - 1))


def share_prefixes(
    step: AttentionStep, groups: PrefixGroups | None, buffers: Buffers
) -> AttentionStep:
    """Return the decode step with `shared`, by groups of its first rows, if there are any."""
    if groups is None:
        return step
    starts, shared = pad_groups(groups, step.num_rows, len(groups.counts))
    host = HostPrefixes(
        query_lens=groups.counts,
        context_lens=groups.lens,
        rest_lens=read_only(step.host_context_lens - shared),
    )
    group_starts, shared_lens = buffers.to_device_packed(starts, shared)
    return split_step(step, group_starts, shared_lens, host, buffers.page_size)


def pad_groups(
    groups: PrefixGroups, rows: int, num_groups: int = MAX_PREFIX_GROUPS
) -> tuple[Ints, Ints]:
    """Return where each group's rows begin, and how many tokens each of `rows` rows shares.

    Groups up to `num_groups` that are missing begin where the last one ends.

    returns: [num_groups + 1] int32, [rows] int32
    """
    ends = groups.counts.cumsum(dtype=np.int32)
    grouped = int(ends[-1]) if len(ends) else 0
    starts = np.full(num_groups + 1, grouped, np.int32)
    starts[0], starts[1 : len(ends) + 1] = 0, ends
    shared = np.zeros(rows, np.int32)
    shared[:grouped] = groups.lens.repeat(groups.counts)
    return starts, shared


def bound_prefixes(rows: int, groups: int, max_seq_len: int) -> HostPrefixes:
    """Return the maximum sizes for a capture of these rows and groups."""
    return HostPrefixes(
        query_lens=np.full(groups, rows, np.int32),
        context_lens=np.full(groups, max_seq_len, np.int32),
        rest_lens=np.full(rows, max_seq_len, np.int32),
    )
