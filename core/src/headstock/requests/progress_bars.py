"""Progress bars on standard error: the command line's on a terminal only, tqdm's for Python."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from headstock.errors import UsageError, describe_type
from headstock.requests.terminal import can_draw, can_style

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BYTE_STAGES = ("weights",)
"""Stages whose amounts are bytes."""


@frozen
class StageBar:
    """The bar of a stage, and when the stage began, in seconds of `time.monotonic`."""

    task: TaskID
    start: float


class ProgressBars:
    """One bar for each stage; none where standard error cannot draw any, or when not `shown`."""

    def __init__(self, *, shown: bool = True) -> None:
        self.progress: Progress | None = None
        self.stages: dict[str, StageBar] = {}
        if shown and can_draw(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
            )
            # On a terminal that shows the answers too, rich prints them above the bar; soft_wrap
            # leaves their lines as long as they are. Answers that go elsewhere must not pass
            # through rich at all: it would write them to standard error.
            console = Console(
                stderr=True,
                soft_wrap=True,
                color_system="auto" if can_style(sys.stderr) else None,
            )
            is_shared = sys.stdout.isatty()
            self.progress = Progress(
                *columns, console=console, transient=True, redirect_stdout=is_shared
            )

    def update(self, stage: str, completed: int, total: int, num_tokens: int = 0) -> None:
        """Set the bar of `stage` to `completed` of `total`.

        With `num_tokens`, the bar shows their rate since the stage began. What follows a comma in
        the stage's name may change from call to call.
        """
        if self.progress is None:
            return
        name = stage.partition(",")[0]
        if name not in self.stages:
            task = self.progress.add_task(stage, total=total, amount="")
            self.stages[name] = StageBar(task, time.monotonic())
        seconds = time.monotonic() - self.stages[name].start
        amount = format_amount(name, completed, total, seconds, num_tokens)
        self.progress.update(
            self.stages[name].task,
            description=stage,
            completed=completed,
            total=total,
            amount=amount,
        )

    @contextmanager
    def hide(self) -> Iterator[None]:
        """Show no bar in this block, which writes to the same terminal past rich."""
        if self.progress is None:
            yield
            return
        self.progress.stop()
        try:
            yield
        finally:
            self.progress.start()

    def __enter__(self) -> ProgressBars:
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


def format_amount(
    stage: str, completed: int, total: int, seconds: float, num_tokens: int = 0
) -> str:
    """`completed` of `total` in words, the rate after `seconds`, and the time left at that rate.

    Bytes have a rate, and so do tokens where there are any.
    """
    time_left = (
        f", {_format_duration(seconds * (total - completed) / completed)} left"
        if 0 < completed < total and seconds >= 1
        else ""
    )
    if stage not in BYTE_STAGES:
        rate = f", {num_tokens / seconds:.1f} tokens/s" if num_tokens and seconds > 0 else ""
        return f"{completed} of {total}{rate}{time_left}"
    unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
    rate = f", {completed / seconds / size:.2f} {unit}/s" if seconds > 0 else ""
    return f"{completed / size:.2f} of {total / size:.2f} {unit}{rate}{time_left}"


def _format_duration(seconds: float) -> str:
    """Minutes and seconds, with hours where there are some: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class TqdmBar(Protocol):
    """The part of a tqdm bar that is used here."""

    postfix: str | None

    def update(self, n: float = 1, /) -> object:
        """Count `n` more prompts."""

    def close(self) -> object:
        """Leave the bar as it is."""


def _make_tqdm_bar(**options: object) -> TqdmBar:
    """A bar of tqdm, drawn by a notebook where there is one."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # not earlier: it looks for notebooks

    bar: TqdmBar = tqdm(**options)
    return bar


UseTqdm = bool | Callable[..., TqdmBar]
"""Whether to draw a bar as tqdm does, or the callable to make it with instead of
`tqdm.auto.tqdm`.
"""


@contextmanager
def prompt_bar(use_tqdm: UseTqdm, total: int) -> Iterator[Callable[[bool, int], None]]:
    """A tqdm bar of `total` prompts, with tokens a second beside it.

    It yields `advance(is_finished, num_tokens)`, which counts one output.
    raises: UsageError
    """
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise UsageError(
            "use_tqdm: expected True, False or a callable that makes a bar, got "
            f"{describe_type(use_tqdm)}"
        )
    if use_tqdm is False:
        yield lambda is_finished, num_tokens: None
        return
    make_bar = _make_tqdm_bar if use_tqdm is True else use_tqdm
    bar = make_bar(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
    total_tokens, start = 0, time.monotonic()

    def advance(is_finished: bool, num_tokens: int) -> None:
        """Count an output of `num_tokens`; a finished one moves the bar."""
        nonlocal total_tokens
        total_tokens += num_tokens
        if is_finished:
            # Set without a redraw, which `update` does at the rate that tqdm limits.
            bar.postfix = f"{total_tokens / max(time.monotonic() - start, 1e-9):.1f} tokens/s"
            bar.update(1)

    try:
        yield advance
    finally:
        bar.close()
