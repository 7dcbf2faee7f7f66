"""What the kernels are told of a step."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from headstock.spi import AttentionStep, Phase


@frozen(kw_only=True, eq=False)
class TrtllmPlan:
    """A step as the kernels take it. Only what the tensors hold changes between replays of a graph.

    query_start: [rows + 1] int32    context_lens: [rows] int32    page_tables: by group, [rows, columns] int32, dense
    """

    query_start: Tensor
    context_lens: Tensor
    page_tables: tuple[Tensor, ...]
    max_query_len: int
    max_context_len: int
    is_decode: bool

    @classmethod
    def of(cls, step: AttentionStep) -> TrtllmPlan:
        """The step's own tensors. Rows of a page table must follow each other: the kernels know no strides for it."""
        return cls(
            query_start=step.query_start,
            context_lens=step.context_lens,
            page_tables=tuple(table.contiguous() for table in step.page_tables),
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            is_decode=step.phase is Phase.DECODE,
        )

    @property
    def num_rows(self) -> int:
        """How many rows the step has."""
        return len(self.context_lens)

    @cached_property
    def context_start(self) -> Tensor:
        """Where each row's context would start if all were laid end to end. [rows + 1] int32"""
        return F.pad(self.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
