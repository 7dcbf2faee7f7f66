"""The captured steps by kind and size, and those still to be captured."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Generator
from typing import Any, Literal

from attrs import define, field, frozen

LOG = logging.getLogger("headstock.cudagraph")

Kind = Literal["rows", "prompt", "verify"]
"""Steps of decode rows, with prompt tokens, and of rows that verify drafts."""

Capture = Generator[None, None, Any]
"""The captures of one bucket, which pause after each graph; finally the bucket, or None if replays
of its size are not worth it.
"""


@frozen(order=True)
class BucketKey:
    """A size of a kind of step: the maximum tokens and rows of such a step."""

    tokens: int
    rows: int
    kind: Kind


@define(eq=False)
class GraphBuckets:
    """Buckets by kind and size.

    A capture pauses after each graph. One that began while no step was due therefore continues when
    a step needs its size.

    captured: the finished ones, None if replays are not worth it
    waiting: the others, in the order in which they are captured while no step is due
    by_kind: all of a kind, the smallest first
    """

    captured: dict[BucketKey, Any] = field(factory=dict)
    waiting: dict[BucketKey, Capture] = field(factory=dict)
    by_kind: dict[Kind, list[BucketKey]] = field(factory=dict)

    def add(self, key: BucketKey, capture: Capture) -> None:
        """Add a bucket to be captured."""
        self.waiting[key] = capture
        self.by_kind[key.kind] = sorted([*self.by_kind.get(key.kind, ()), key])

    def find_key(self, kind: Kind, rows: int, tokens: int) -> BucketKey | None:
        """Find the smallest size with room for these rows and tokens."""
        for key in self.by_kind.get(kind, ()):
            if key.tokens >= tokens and key.rows >= rows:
                return key
        return None

    def take(self, key: BucketKey) -> Any:
        """Return the bucket, captured now if necessary; None if there is none.

        A step waits for it: a failure is logged and ends all captures.
        """
        if key in self.waiting:
            try:
                self.finish(key)
            except Exception as error:
                self._give_up(error)
        return self.captured.get(key)

    def finish(self, key: BucketKey) -> None:
        """Finish a capture.   raises: what it raises"""
        while key in self.waiting:
            self._advance(key)

    def advance(self) -> None:
        """Capture the next graph; a failure is logged and ends all captures."""
        if self.waiting:
            try:
                self._advance(next(iter(self.waiting)))
            except Exception as error:
                self._give_up(error)

    def _advance(self, key: BucketKey) -> None:
        """Capture one graph of a bucket."""
        try:
            next(self.waiting[key])
        except StopIteration as end:
            del self.waiting[key]
            self.captured[key] = end.value

    def of_kind(self, kind: Kind) -> dict[int, Any]:
        """The captured buckets of a kind by their rows, those of prompts by their tokens.

        The smallest is first.
        """
        return {
            key.tokens if kind == "prompt" else key.rows: bucket
            for key in self.by_kind.get(kind, ())
            if (bucket := self.captured.get(key)) is not None
        }

    def _give_up(self, error: Exception) -> None:
        """Stop capturing: the cause of one failure, such as a lack of memory, would fail other
        captures too."""
        num_left, last = len(self.waiting), traceback.extract_tb(error.__traceback__)[-1]
        self.waiting.clear()
        LOG.warning(
            "no more graphs are captured, and steps of %d sizes run without: %s: %s, at %s:%s",
            num_left,
            type(error).__name__,
            " ".join(str(error).split())[:300],
            last.filename,
            last.lineno,
        )
