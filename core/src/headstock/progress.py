"""Progress bars on standard error, when it is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Bars:
    """One bar for each stage reported; nothing at all where standard error is no terminal, or when not `shown`."""

    def __init__(self, *, shown: bool = True) -> None:
        self.progress: Progress | None = None
        self.stages: dict[str, TaskID] = {}
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self.progress = Progress(console=Console(stderr=True), transient=True)

    def report(self, stage: str, done: int, total: int) -> None:
        """Set the bar of `stage` to `done` of `total`."""
        if self.progress is None:
            return
        if stage not in self.stages:
            self.stages[stage] = self.progress.add_task(stage, total=total)
        self.progress.update(self.stages[stage], completed=done, total=total)

    def __enter__(self) -> Bars:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.progress is not None:
            self.progress.stop()
