"""Progress bars on standard error: the command line's on a terminal only, tqdm's for Python."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from headstock.errors import UsageError, describe_type

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
    """One bar for each stage reported; nothing at all where standard error is no terminal, or when
    not `shown`.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.progress: Progress | None = None
        self.stages: dict[str, Stage] = {}
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
            )
            # Where answers go to the same terminal they are written above the bar, in lines as long
            # as they are. Elsewhere they must not pass through it at all: it writes to standard
            # error.
            console = Console(stderr=True, soft_wrap=True)
            shared = sys.stdout.isatty()
            self.progress = Progress(
                *columns, console=console, transient=True, redirect_stdout=shared
            )

    def report(self, stage: str, done: int, total: int, tokens: int = 0) -> None:
        """Set the bar of `stage` to `done` of `total`, with the rate of `tokens` since it began, if
        there are any.

        What comes after a comma in the stage's name may change on the way.
        """
        if self.progress is None:
            return
        name = stage.partition(",")[0]
        if name not in self.stages:
            bar = self.progress.add_task(stage, total=total, amount="")
            self.stages[name] = Stage(bar, time.monotonic())
        seconds = time.monotonic() - self.stages[name].began
        text = amount(name, done, total, seconds, tokens)
        self.progress.update(
            self.stages[name].bar, description=stage, completed=done, total=total, amount=text
        )

    def __enter__(self) -> Bars:
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.progress is not None:
            self.progress.stop()


def amount(stage: str, done: int, total: int, seconds: float, tokens: int = 0) -> str:
    """How much of a stage is done after `seconds`, in words, and how long the rest takes at that
    rate.

    Bytes come with their rate, and so do `tokens` where there are any.
    """
    rest = (
        f", {clock(seconds * (total - done) / done)} left"
        if 0 < done < total and seconds >= 1
        else ""
    )
    if stage not in BYTES:
        rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""
        return f"{done} of {total}{rate}{rest}"
    unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
    rate = f", {done / seconds / size:.2f} {unit}/s" if seconds > 0 else ""
    return f"{done / size:.2f} of {total / size:.2f} {unit}{rate}{rest}"


def clock(seconds: float) -> str:
    """A time as minutes and seconds, with hours where there are some: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def tqdm_bar(**options: Any) -> Any:
    """A bar of tqdm, drawn by a notebook where there is one."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # not earlier: it looks for notebooks

    return tqdm(**options)


UseTqdm = bool | Callable[..., Any]
"""Whether to draw a bar as tqdm does, or what to make it with in place of `tqdm.auto.tqdm`."""


@contextmanager
def prompt_bar(use_tqdm: UseTqdm, total: int) -> Iterator[Callable[[bool, int], None]]:
    """A tqdm bar of `total` prompts with tokens a second beside it; `advance(ended, tokens)` takes
    the news of one.

    raises: UsageError
    """
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise UsageError(
            "use_tqdm must be True, False or a callable that makes a bar, got "
            f"{describe_type(use_tqdm)}"
        )
    if use_tqdm is False:
        yield lambda ended, tokens: None
        return
    make_bar = tqdm_bar if use_tqdm is True else use_tqdm
    bar = make_bar(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
    count, began = 0, time.monotonic()

    def advance(ended: bool, tokens: int) -> None:
        """Count one prompt's news."""
        nonlocal count
        count += tokens
        if ended:
            bar.postfix = f"{count / max(time.monotonic() - began, 1e-9):.1f} tokens/s"
            bar.update(1)

    try:
        yield advance
    finally:
        bar.close()
