"""The static buffers that captured decode steps read."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from headstock.spi import AttentionStep
from headstock_trtllm.step import TrtllmPlan


@frozen(eq=False)
class StaticRows:
    """Room for the largest bucket; a bucket uses the first rows.

    query_start: [rows + 1] int32, 0, 1, 2, ...    context_lens: [rows] int32
    page_tables: by group, [rows, columns] int32, made when the first step shows how many groups there are
    """

    query_start: Tensor
    context_lens: Tensor
    page_tables: dict[int, Tensor]
    columns: int
    max_seq_len: int

    @classmethod
    def new(cls, rows: int, max_seq_len: int, page_size: int, device: torch.device) -> StaticRows:
        """Buffers in which every row is padding: one token, in the dummy page."""
        start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lens = torch.ones(rows, dtype=torch.int32, device=device)
        return cls(start, lens, {}, -(-max_seq_len // page_size), max_seq_len)

    def table(self, group: int) -> Tensor:
        """The page table of a group, all dummy pages at first."""
        if group not in self.page_tables:
            self.page_tables[group] = self.context_lens.new_zeros((len(self.context_lens), self.columns))
        return self.page_tables[group]

    def plan(self, bucket: int, groups: int) -> TrtllmPlan:
        """A plan over the first `bucket` rows."""
        return TrtllmPlan(
            query_start=self.query_start[: bucket + 1],
            context_lens=self.context_lens[:bucket],
            page_tables=tuple(self.table(group)[:bucket] for group in range(groups)),
            max_query_len=1,
            max_context_len=self.max_seq_len,
            is_decode=True,
        )

    def memory_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(each.nbytes for each in (self.query_start, self.context_lens, *self.page_tables.values()))


def write(plan: TrtllmPlan, step: AttentionStep) -> None:
    """Bring a plan's buffers up to date with a step of at most as many rows; the other rows become padding.

    writes: plan.context_lens, plan.page_tables
    """
    rows = step.num_rows
    plan.context_lens[:rows].copy_(step.context_lens)
    plan.context_lens[rows:].fill_(1)
    for static, table in zip(plan.page_tables, step.page_tables, strict=True):
        static[:rows, : table.shape[1]].copy_(table)
        static[rows:, 0].zero_()
