"""A step for kernels that read lengths and page tables on the device: the host plans nothing."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from headstock.spi import AttentionStep, Phase


@frozen(kw_only=True, eq=False)
class PagedPlan:
    """A step's own tensors, and the numbers that size a launch.

    A graph that is replayed reads the tensors anew and keeps the numbers, so these must hold for
    every step that it is replayed for. A backend whose launch depends on more adds fields of its
    own.

    query_start: [rows + 1] int32    context_lens: [rows] int32, with this step's tokens
    page_tables: one a KV group, [rows, columns] int32, dense: kernels may know no strides for them
    """

    query_start: Tensor
    context_lens: Tensor
    page_tables: tuple[Tensor, ...]
    max_query_len: int
    max_context_len: int
    is_decode: bool

    @classmethod
    def of(cls, step: AttentionStep, **more: Any) -> Self:
        """The plan of a step; `more` are the fields that a backend added."""
        return cls(
            query_start=step.query_start,
            context_lens=step.context_lens,
            page_tables=tuple(table.contiguous() for table in step.page_tables),
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            is_decode=step.phase is Phase.DECODE,
            **more,
        )

    @property
    def num_rows(self) -> int:
        """How many rows the step has."""
        return len(self.context_lens)

    @cached_property
    def context_start(self) -> Tensor:
        """Where each row's context would start if all were laid end to end; made at first use.

        Not for graphs, which would keep what it was then.
        returns: [rows + 1] int32
        """
        return F.pad(self.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
