"""How long the device works on each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class StepClock:
    """Notes when steps are launched and end.

    The device runs steps one after another, so a step begins when the one before it ends, or when
    it is launched.

    now: seconds of some clock
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.launched: deque[float] = deque()
        self.ended = 0.0

    def note_launch(self) -> None:
        """A step is about to be launched."""
        self.launched.append(self.now())

    def note_end(self) -> float:
        """The oldest step in flight has ended; return the seconds that it took."""
        began, self.ended = max(self.launched.popleft(), self.ended), self.now()
        return self.ended - began

    def measure_running(self) -> float:
        """Seconds for which the device has worked on the youngest step, the only one in flight."""
        return self.now() - max(self.launched[-1], self.ended)
