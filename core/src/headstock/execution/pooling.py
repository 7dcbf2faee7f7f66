"""Rows that pool: how, their sums on the device, and whether what they computed is sound."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headstock.execution.buffers import Buffers
from headstock.scheduler import Plan, Request
from headstock.spi import Pooling, Sample
from headstock.spi.arrays import Ints


class PoolingTable:
    """How each row pools; a row is written when a request is admitted to it.

    sums: [rows, hidden] float32, of the hidden states of rows that take the mean; None before the
        first of them: most engines never pool
    """

    def __init__(self, rows: int, hidden: int, device: torch.device) -> None:
        self.is_mean = np.zeros(rows, bool)
        self.hidden = hidden
        self.device = device
        self.sums: Tensor | None = None

    def write_row(self, row: int, request: Request) -> None:
        """Write how the request pools to its row."""
        self.is_mean[row] = request.pooling == "mean"

    def make_pooling(self, plan: Plan, buffers: Buffers) -> Pooling | None:
        """Make the record of the plan's rows that pool; None without any.

        writes: sums, when they are needed for the first time
        """
        rows = plan.pooled_rows
        if not len(rows):
            return None
        is_mean = self.is_mean[plan.rows[rows]]
        if is_mean.any() and self.sums is None:
            shape = len(self.is_mean), self.hidden
            self.sums = torch.zeros(shape, dtype=torch.float32, device=self.device)
        at, means = buffers.to_device_packed(rows, is_mean)
        return Pooling(rows=at, is_mean=means, sums=self.sums if is_mean.any() else None)

    def check_pooled(self, plan: Plan, sample: Sample) -> None:
        """Raise RuntimeError unless the runner pooled each row that the plan pools."""
        expected = (len(plan.pooled_rows), self.hidden)
        shape = None if sample.pooled is None else tuple(sample.pooled.shape)
        if expected[0] and shape != expected:
            raise RuntimeError(
                f"pooled hidden states of the runner: expected shape {expected}, got {shape}"
            )


def find_pooled_health(sample: Sample) -> np.ndarray:
    """Return which pooled rows are finite, [pooled] bool; of a sample in host memory."""
    if sample.pooled is None:
        return np.zeros(0, bool)
    healthy: np.ndarray = torch.isfinite(sample.pooled).all(1).numpy()
    return healthy


def find_healthy_rows(plan: Plan, sample: Sample) -> np.ndarray:
    """Return which rows of the plan are sound, [rows] bool, by what they were scored or pooled to.

    A row that is scored several times for drafts is sound where all its scores are; of other rows
    the last score counts.
    sample: in host memory
    """
    healthy = sample.healthy.numpy()
    if not len(plan.pooling):
        return _find_healthy_logits(plan.num_logits, bool(len(plan.num_drafts)), healthy)
    rows = np.ones(len(plan.rows), bool)
    scored = plan.num_logits > 0
    if scored.any():
        counts = plan.num_logits[scored]
        rows[scored] = _find_healthy_logits(counts, bool(len(plan.num_drafts)), healthy)
    rows[plan.pooled_rows] = find_pooled_health(sample)
    return rows


def _find_healthy_logits(counts: Ints, has_drafts: bool, healthy: np.ndarray) -> np.ndarray:
    """Return which rows' logits are sound, [rows] bool; `counts` [rows] has each row's logits."""
    ends = np.cumsum(counts, dtype=np.int64)
    # A draft that is rejected tells as much of a row's soundness as any other token.
    rows: np.ndarray = (
        np.logical_and.reduceat(healthy, ends - counts) if has_drafts else healthy[ends - 1]
    )
    return rows
