"""How long the parts of a start take."""

from __future__ import annotations

import os
import time
from pathlib import Path

from attrs import define, field


@define
class StartTimes:
    """A clock that is read after each part of a start.

    last: when the part that goes on began, in seconds of `time.monotonic`
    parts: names and seconds, in order
    """

    last: float = field(factory=time.monotonic)
    parts: list[tuple[str, float]] = field(factory=list)

    def end_part(self, name: str) -> None:
        """Note that the part which went on since the last one has ended."""
        now = time.monotonic()
        self.parts.append((name, now - self.last))
        self.last = now


def begin_start(count_process: bool) -> StartTimes:
    """A clock; with `count_process`, the first part is what the process did before: imports."""
    age = read_process_age() if count_process else None
    return StartTimes(parts=[] if age is None else [("imports", age)])


def read_process_age() -> float | None:
    """The seconds since this process began; None where the system does not say."""
    try:
        # The name of the program stands in parentheses and may hold spaces; see proc(5).
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def format_parts(parts: tuple[tuple[str, float], ...]) -> str:
    """The parts and their sum, as text."""
    total = sum(seconds for _, seconds in parts)
    return f"{' + '.join(f'{name} {seconds:.1f}' for name, seconds in parts)} = {total:.1f} s"
