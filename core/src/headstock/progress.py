"""Progress bars on standard error, when it is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BYTES = ("weights",)
"""Stages that are reported in bytes."""


@frozen
class Stage:
    """A bar and when it began, in seconds."""

    bar: TaskID
    began: float


class Bars:
    """One bar for each stage reported; nothing at all where standard error is no terminal, or when not `shown`."""

    def __init__(self, *, shown: bool = True) -> None:
        self.progress: Progress | None = None
        self.stages: dict[str, Stage] = {}
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
            self.progress = Progress(*columns, console=Console(stderr=True), transient=True)

    def report(self, stage: str, done: int, total: int) -> None:
        """Set the bar of `stage` to `done` of `total`; what comes after a comma in its name may change on the way."""
        if self.progress is None:
            return
        name = stage.partition(",")[0]
        if name not in self.stages:
            bar = self.progress.add_task(stage, total=total, amount="")
            self.stages[name] = Stage(bar, time.monotonic())
        seconds = time.monotonic() - self.stages[name].began
        text = amount(name, done, total, seconds)
        self.progress.update(self.stages[name].bar, description=stage, completed=done, total=total, amount=text)

    def __enter__(self) -> Bars:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.progress is not None:
            self.progress.stop()


def amount(stage: str, done: int, total: int, seconds: float) -> str:
    """How much of a stage is done, in words; bytes with their rate over `seconds`."""
    if stage not in BYTES:
        return f"{done} of {total}"
    unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
    rate = f", {done / seconds / size:.2f} {unit}/s" if seconds > 0 else ""
    return f"{done / size:.2f} of {total / size:.2f} {unit}{rate}"
