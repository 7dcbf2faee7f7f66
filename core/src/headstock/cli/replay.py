"""`headstock replay`: a recorded schedule run again without a device, and drawn."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from headstock.cli.process import check_distinct_files
from headstock.cli.tables import fold_line, terminal_width
from headstock.config.flags import FlagParser
from headstock.errors import CannotRun, ModelError, format_count, shorten
from headstock.record.file import Recording, read
from headstock.record.header import limits_of
from headstock.record.replay import Divergence, replay
from headstock.record.view.data import collect
from headstock.record.view.page import render
from headstock.record.view.timeline import Timeline
from headstock.record.view.watch import Watch

EPILOG = """
'headstock run --record FILE' and 'headstock bench --record FILE' make recordings; so does an engine
that dies. Exit codes: 0 every plan came out as recorded, 1 one did not, 2 usage, 5 the recording
has no beginning or its plugins are not installed, 6 a file cannot be read or written.
"""


def main(arguments: list[str]) -> int:
    """Run `headstock replay ARGUMENTS` and return the exit code.   raises: HeadstockError"""
    asked = make_parser().parse_args(arguments)
    check_distinct_files({"FILE": asked.file, "--timeline": asked.timeline, "--html": asked.html})
    recording = read(asked.file, partial=asked.partial)
    if asked.timeline is not None:
        draw_timeline(recording, asked.timeline)
    if recording.first:
        if asked.timeline is None or asked.html is not None:
            raise CannotRun(
                f"{recording.name} begins with step {recording.first}, and a schedule can be run "
                "again from step 0 only; --timeline FILE draws what is there"
            )
        return 0
    return run_again(recording, asked)


def make_parser() -> FlagParser:
    """The parser of `headstock replay`."""
    about = (
        "Run a recorded schedule again, without a device or a model, and say where it first "
        "differs."
    )
    root = FlagParser(
        prog="headstock replay", usage="%(prog)s FILE [options]", description=about, epilog=EPILOG
    )
    root.add_argument("file", metavar="FILE", help="a recording")
    root.add_argument(
        "--timeline",
        metavar="OUT.json",
        help="write a trace for ui.perfetto.dev or chrome://tracing",
    )
    root.add_argument(
        "--html", metavar="OUT.html", help="write a page with requests, steps, pages and prefixes"
    )
    root.add_argument(
        "--check", action="store_true", help="check the scheduler's invariants after every step"
    )
    root.add_argument("--partial", action="store_true", help="accept a file that breaks off")
    return root


def draw_timeline(recording: Recording, path: str) -> None:
    """Write the trace.   raises: ModelError"""
    try:
        with open(path, "w", encoding="utf-8") as file:
            timeline = Timeline(file)
            for moment in recording.moments():
                timeline.see(moment)
            timeline.end()
    except OSError as error:
        raise ModelError(
            f"--timeline {shorten(path)}: cannot be written: {error.strerror}"
        ) from error


def run_again(recording: Recording, asked: Namespace) -> int:
    """Print how the replay ended, and write the page; 1 when it differs."""
    limits = limits_of(recording.header, check=asked.check)
    watch = Watch(limits) if asked.html is not None else None
    steps, error = 0, ""
    divergence: Divergence | None = None
    for replayed in replay(recording.moments(), limits):
        steps += 1
        divergence, error = replayed.divergence, replayed.moment.error
        if watch is not None:
            watch.see(replayed)
    verdict = (
        str(divergence) if divergence is not None else f"{format_count(steps, 'step')}, identical"
    )
    if error and divergence is None:
        verdict += f"; the last one fails as recorded: {error}"
    if not recording.whole:
        verdict += "; the recording breaks off there"
    print(fold_line(verdict, terminal_width(sys.stdout), 0))
    if watch is not None:
        write_page(
            asked.html, render(collect(watch, recording.header, verdict, whole=recording.whole))
        )
    return int(divergence is not None)


def write_page(path: str, text: str) -> None:
    """Write the page.   raises: ModelError"""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModelError(f"--html {shorten(path)}: cannot be written: {error.strerror}") from error
