"""Decode rows at fixed addresses, for backends with `Planning.NONE` whose kernels graphs replay."""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import AttentionStep, Phase


@frozen(eq=False)
class StaticRows:
    """Room for the rows of the largest bucket.

    Smaller buckets use its first rows, since no two graphs run at the same time.

    A graph reads lengths and page tables where they lay when it was captured. A backend with
    `Planning.NONE` makes one of these in `graph_init`. Its `graph_plan` plans
    `step(bucket, groups)` as it plans any other step. Its `graph_update` is `write`, which only
    asks the device for copies, so that a graph can hold it.

    query_start: [rows + 1] int32, 0, 1, 2, ...    context_lens: [rows] int32
    page_tables: by group, [rows, columns] int32, made when the first step shows how many groups
        there are
    """

    query_start: Tensor
    context_lens: Tensor
    page_tables: list[Tensor]
    columns: int
    max_seq_len: int

    @classmethod
    def new(cls, rows: int, max_seq_len: int, page_size: int, device: torch.device) -> StaticRows:
        """Room in which every row is padding: one token, in the dummy page."""
        start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lens = torch.ones(rows, dtype=torch.int32, device=device)
        return cls(start, lens, [], -(-max_seq_len // page_size), max_seq_len)

    def step(self, bucket: int, groups: int) -> AttentionStep:
        """The first `bucket` rows as a decode step.

        To the host every row is as long as it may get. A launch of that size is right for all
        lengths that `write` brings later.
        """
        while len(self.page_tables) < groups:
            self.page_tables.append(
                self.context_lens.new_zeros((len(self.context_lens), self.columns))
            )
        return AttentionStep(
            phase=Phase.DECODE,
            query_start=self.query_start[: bucket + 1],
            context_lens=self.context_lens[:bucket],
            page_tables=tuple(table[:bucket] for table in self.page_tables),
            host_query_lens=np.ones(bucket, np.int32),
            host_context_lens=np.full(bucket, self.max_seq_len, np.int32),
        )

    def write(self, bucket: int, step: AttentionStep) -> None:
        """Bring the first `bucket` rows up to date with a step; those that it lacks become padding.

        Columns beyond the step's keep what they held, which no length reaches.
        writes: context_lens, page_tables
        """
        rows = step.num_rows
        self.context_lens[:rows].copy_(step.context_lens)
        # The bucket is launched whole: missing rows read one token of the dummy page.
        self.context_lens[rows:bucket].fill_(1)
        for static, table in zip(self.page_tables, step.page_tables, strict=True):
            static[:rows, : table.shape[1]].copy_(table)
            static[rows:bucket, 0].zero_()

    def memory_bytes(self) -> int:
        """Bytes of device memory."""
        return sum(
            tensor.nbytes for tensor in (self.query_start, self.context_lens, *self.page_tables)
        )
