"""Masks go to ranks by parts of the vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from headstock.scheduler import Plan
from headstock_multiprocess.masks import ReceivingMasks, SendingMasks
from headstock_multiprocess.messages import Masks, Message

PLAN = cast("Plan", SimpleNamespace())


class Words:
    """Word w of row r is 100 r + w."""

    logits = np.array([0, 2, 5])

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def plan_masks(self, plan: Plan) -> Words:
        return self

    def fill(self, masks: np.ndarray) -> None:
        assert masks.flags.c_contiguous
        masks[:] = np.arange(len(masks))[:, None] * 100 + np.arange(masks.shape[1])


@pytest.mark.parametrize(("vocab", "count", "words"), [(192, 2, 3), (130, 2, 3), (40, 3, 1)])
def test_each_rank_gets_the_words_of_its_part(vocab: int, count: int, words: int) -> None:
    sent: list[list[Message]] = [[] for _ in range(count - 1)]

    def send_each(messages: Any) -> None:
        for inbox, message in zip(sent, messages, strict=True):
            inbox.append(message)

    source = SendingMasks(
        Words(vocab), count, lambda each: send_each([each] * (count - 1)), send_each
    )
    planned = source.plan_masks(PLAN)
    assert planned is not None
    parts = [np.full((3, words), 7, np.int32) for _ in range(count)]
    planned.fill(parts[0])
    for inbox, part in zip(sent, parts[1:], strict=True):
        received = ReceivingMasks(lambda kind, inbox=inbox: inbox.pop(0)).plan_masks(PLAN)
        assert received is not None and received.logits.tolist() == [0, 2, 5]
        assert isinstance(inbox[0], Masks) and len(inbox[0].words) == part.nbytes
        assert len(msgspec.msgpack.encode(inbox[0])) < part.nbytes + 20
        received.fill(part)

    joined = np.concatenate(parts, 1)
    whole = -(-vocab // 32)
    expected = np.arange(3)[:, None] * 100 + np.arange(whole)
    assert np.array_equal(joined[:, :whole], expected)
    assert not joined[:, whole:].any()
