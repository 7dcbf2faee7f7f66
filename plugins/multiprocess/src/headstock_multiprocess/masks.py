"""Masks of answers that follow a grammar: rank 0 fills them, and the others receive them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from headstock.execution import token_masks
from headstock.scheduler import Plan
from headstock_multiprocess.messages import MaskedLogits, Masks, Message

NO_LOGITS: np.ndarray = np.zeros(0, np.int64)


@frozen(eq=False)
class SentMasks:
    """Masks whose parts go to the other ranks as soon as they are filled."""

    planned: token_masks.PlannedMasks
    source: SendingMasks

    @property
    def logits(self) -> np.ndarray:
        """See `PlannedMasks.logits`."""
        return self.planned.logits

    def fill(self, masks: np.ndarray) -> None:
        """See `PlannedMasks.fill`."""
        own = masks.shape[1]
        whole = np.empty((len(masks), -(-self.source.source.vocab // 32)), masks.dtype)
        self.planned.fill(whole)
        first, *others = (
            _pad_words(whole[:, start : start + own], own)
            for start in range(0, self.source.count * own, own)
        )
        masks[:] = first
        self.source.send_each([Masks(part.tobytes()) for part in others])


def _pad_words(part: np.ndarray, words: int) -> np.ndarray:
    """A part of a mask with as many words as all parts have."""
    missing = words - part.shape[1]
    return np.pad(part, ((0, 0), (0, missing))) if missing else part


@frozen(eq=False)
class SendingMasks:
    """Rank 0's source of masks, of which each rank gets the part of its vocabulary.

    count: of ranks    send: to all others    send_each: a message to each of them
    """

    source: token_masks.WholeMaskSource
    count: int
    send: Callable[[Message], None]
    send_each: Callable[[Sequence[Message]], None]

    def plan_masks(self, plan: Plan) -> SentMasks | None:
        """See `MaskSource.plan_masks`."""
        planned = self.source.plan_masks(plan)
        logits = NO_LOGITS if planned is None else planned.logits
        self.send(MaskedLogits(logits.astype(np.int64).tobytes()))
        return None if planned is None else SentMasks(planned, self)


@frozen(eq=False)
class ReceivedMasks:
    """Masks that rank 0 fills.   expect: returns the next message, which is of a type"""

    logits: np.ndarray
    expect: Callable[[type[Any]], Any]

    def fill(self, masks: np.ndarray) -> None:
        """See `PlannedMasks.fill`."""
        masks[:] = np.frombuffer(self.expect(Masks).words, masks.dtype).reshape(masks.shape)


@frozen(eq=False)
class ReceivingMasks:
    """The source of masks of another rank than 0."""

    expect: Callable[[type[Any]], Any]

    def plan_masks(self, plan: Plan) -> ReceivedMasks | None:
        """See `MaskSource.plan_masks`."""
        logits = np.frombuffer(self.expect(MaskedLogits).logits, np.int64)
        return ReceivedMasks(logits, self.expect) if len(logits) else None
