"""Captures that are still to be done, one graph at a time."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator

from attrs import define, field, frozen

LOG = logging.getLogger("headstock.cudagraph")


@frozen(order=True)
class TaskKey:
    """What a task captures: a size of a kind of step.

    tokens: how many tokens a step of this size has
    kind: "rows", "prompt" or "verify"
    size: as the kind counts it
    """

    tokens: int
    kind: str
    size: int


@define(eq=False)
class CaptureTasks:
    """Sizes that are still to be captured, in order, each with the rest of its captures.

    A task stops after each graph. So one that was begun while no step was due goes on where it
    stopped when a step needs its size.
    """

    tasks: dict[TaskKey, Iterator[None]] = field(factory=dict)

    def finish(self, key: TaskKey) -> None:
        """Do all that is left of a task; a task that is done, or unknown, is no work.

        raises: what the captures raise
        """
        for _ in self.tasks.get(key, ()):
            pass
        self.tasks.pop(key, None)

    def finish_now(self, key: TaskKey) -> None:
        """As `finish`, while a step waits for it: a failure is logged and ends all captures."""
        if key in self.tasks:
            try:
                self.finish(key)
            except Exception as error:
                self.give_up(error)

    def advance(self) -> None:
        """Capture the next graph; a failure is logged and ends all captures."""
        if not self.tasks:
            return
        key = next(iter(self.tasks))
        try:
            next(self.tasks[key])
        except StopIteration:
            del self.tasks[key]
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Capture no more: what made one capture fail, as a lack of memory, fails others too."""
        num_left, last = len(self.tasks), traceback.extract_tb(error.__traceback__)[-1]
        self.tasks.clear()
        LOG.warning(
            "no more graphs are captured, and steps of %d sizes run without: %s: %s, at %s:%s",
            num_left,
            type(error).__name__,
            " ".join(str(error).split())[:300],
            last.filename,
            last.lineno,
        )
