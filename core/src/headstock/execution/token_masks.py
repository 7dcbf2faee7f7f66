"""Which tokens rows may sample next, where their answers follow a grammar: bits on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from headstock.scheduler import Plan
from headstock.spi.arrays import Ints

if TYPE_CHECKING:
    from headstock.execution.buffers import Buffers

MASK = "mask"
"""The name that a `kind` of sampling has where some logit of a step is masked."""


class PlannedMasks(Protocol):
    """The masks of a plan, still to be filled."""

    @property
    def logits(self) -> Ints:
        """Which of the plan's logits are masked, [m] int64."""

    def fill(self, masks: np.ndarray) -> None:
        """Fill the masks.   writes: masks [m, words] int32, as `Sampling.mask`"""


class MaskSource(Protocol):
    """Knows which logits of a plan are masked."""

    def plan_masks(self, plan: Plan) -> PlannedMasks | None:
        """Find the plan's logits that are masked; None without any."""


class WholeMaskSource(MaskSource, Protocol):
    """One whose masks are of whole rows.   vocab: how many token ids these have"""

    vocab: int


@frozen(eq=False)
class PendingMasks:
    """Masks that are not filled yet, and where they go.

    rows, positions: [m] int64, each logit's row and the position of the token that it samples
    """

    planned: PlannedMasks
    rows: Ints
    positions: Ints


class TokenMasks:
    """The masks of the rows, each set when a step needs it; all bits are set elsewhere.

    table: [rows, places, words] int32. A row that verifies drafts samples several tokens in a step,
        at positions that follow each other, so the position modulo `places` tells them apart
    stale_rows: rows whose masks are an earlier request's
    """

    def __init__(
        self,
        source: MaskSource | None,
        *,
        rows: int,
        places: int,
        vocab: int,
        device: torch.device,
    ) -> None:
        self.source = source
        self.places = places
        self.words = -(-vocab // 32)
        shape = (rows, places, self.words) if source is not None else (0, places, self.words)
        self.table = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.masked_rows: set[int] = set()
        self.stale_rows: set[int] = set()
        self.is_active = False
        self.pending: PendingMasks | None = None

    @property
    def rules(self) -> frozenset[str]:
        """What a kind of sampling names where logits are masked."""
        return frozenset({MASK} if self.source is not None else ())

    def clear_row(self, row: int) -> None:
        """Let a row, which gets another request, sample any token."""
        if row in self.masked_rows:
            self.masked_rows.remove(row)
            self.stale_rows.add(row)

    def plan(self, plan: Plan, buffers: Buffers) -> None:
        """Find out which logits of the plan are masked; `write` fills these masks."""
        if self.source is None:
            return
        # A graph for several rules reads the table though no row of the step has a mask.
        if self.stale_rows:
            rows = np.fromiter(self.stale_rows, np.int64, len(self.stale_rows))
            self.table[buffers.to_device(rows)] = -1
            self.stale_rows.clear()
        planned = self.source.plan_masks(plan)
        self.is_active = planned is not None
        self.pending = None
        if planned is None:
            return
        counts = plan.num_logits.astype(np.int64)
        ends = np.cumsum(counts)
        logit_rows = np.repeat(plan.rows.astype(np.int64), counts)
        # The token comes one past the scored position, which ends with the row's last.
        after = np.arange(len(logit_rows)) + np.repeat(plan.stops + 1 - ends, counts)
        rows = logit_rows[planned.logits]
        self.masked_rows.update(rows.tolist())
        self.pending = PendingMasks(planned, rows, after[planned.logits])

    def write(self, buffers: Buffers) -> None:
        """Fill the masks that are pending and write them to the device, if any are.

        writes: table
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return
        # Pinned, so that the copy does not wait for the forward pass that runs meanwhile.
        masks = torch.empty(
            (len(pending.rows), self.words),
            dtype=torch.int32,
            pin_memory=buffers.device.type == "cuda",
        )
        pending.planned.fill(masks.numpy())
        at = buffers.to_device_packed(pending.rows, pending.positions % self.places)
        self.table[*at] = masks.to(buffers.device, non_blocking=True)

    def gather(self, row_ids: Tensor, positions: Tensor, kind: frozenset[str]) -> Tensor | None:
        """Gather the masks of a replay's logits; a graph may capture it.

        row_ids, positions: [n] int64, of the tokens that are sampled
        returns: [n, words] int32
        """
        if MASK not in kind:
            return None
        if self.places == 1:
            return self.table[:, 0].index_select(0, row_ids)
        return self.table[row_ids, positions % self.places]

    def make_mask(self, rows: Ints, positions: Ints, buffers: Buffers) -> Tensor | None:
        """Make the masks of these logits; None when none is masked.

        rows, positions: [n] int64, of the tokens that are sampled; the padding row for any token
        """
        if not self.is_active:
            return None
        self.write(buffers)
        row_ids, places = buffers.to_device_packed(rows, positions % self.places)
        return self.table[row_ids, places]
