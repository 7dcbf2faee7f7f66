"""`headstock replay-view`: draw a recorded schedule as a page with its replay, or as a trace."""

from __future__ import annotations

import sys
from pathlib import Path

from headstock.cli import check_distinct_files, fold_line, terminal_width
from headstock.config import FlagParser
from headstock.errors import CannotRun, ModelError, UsageError, shorten
from headstock.record import Recording, read_recording, replay_recording, restore_limits
from headstock_replay_view.history import History
from headstock_replay_view.page import render_html
from headstock_replay_view.page_data import collect_page_data
from headstock_replay_view.timeline import Timeline

EPILOG = """
'headstock run --record FILE' and 'headstock bench --record FILE' make recordings; so does an engine
that dies. Exit codes: 0 drawn, 1 the replay that a page shows differs from the recording, 2 usage,
5 the recording has no beginning or its plugins are not installed, 6 a file cannot be read or
written.
"""


def main(arguments: list[str]) -> int:
    """Run `headstock replay-view ARGUMENTS` and return the exit code.   raises: HeadstockError"""
    options = make_parser().parse_args(arguments)
    if options.html is None and options.timeline is None:
        raise UsageError("expected --html OUT.html, --timeline OUT.json or both, got neither")
    check_distinct_files(
        {"FILE": options.file, "--timeline": options.timeline, "--html": options.html}
    )
    recording = read_recording(options.file, partial=options.partial)
    if options.timeline is not None:
        write_timeline(recording, options.timeline)
    if options.html is None:
        return 0
    if recording.first_step:
        raise CannotRun(
            f"{recording.name} begins with step {recording.first_step}, and a page shows a replay "
            "from step 0; --timeline OUT.json draws what is there"
        )
    return write_page(recording, options.html, check=options.check)


def make_parser() -> FlagParser:
    """The parser of `headstock replay-view`."""
    root = FlagParser(
        prog="headstock replay-view",
        usage="%(prog)s FILE [options]",
        description="Draw a recorded schedule, without a device or a model.",
        epilog=EPILOG,
    )
    root.add_argument("file", metavar="FILE", help="a recording")
    root.add_argument(
        "--html",
        metavar="OUT.html",
        help="run the schedule again and write a page with requests, steps, pages and prefixes",
    )
    root.add_argument(
        "--timeline",
        metavar="OUT.json",
        help="write a trace for ui.perfetto.dev or chrome://tracing",
    )
    root.add_argument(
        "--check",
        action="store_true",
        help="check the scheduler's invariants after every step that --html runs again",
    )
    root.add_argument("--partial", action="store_true", help="accept a file that breaks off")
    return root


def write_timeline(recording: Recording, path: str) -> None:
    """Write the trace.   raises: ModelError"""
    try:
        with open(path, "w", encoding="utf-8") as file:
            timeline = Timeline(file)
            for recorded in recording.read_steps():
                timeline.add_step(recorded)
            timeline.finish()
    except OSError as error:
        raise ModelError(
            f"--timeline {shorten(path)}: cannot be written: {error.strerror}"
        ) from error


def write_page(recording: Recording, path: str, *, check: bool) -> int:
    """Replay the recording, print the result and write the page; return 1 if a step differs.

    raises: ModelError
    """
    limits = restore_limits(recording.header, check=check)
    history = History(limits)
    verdict = replay_recording(recording, limits, history.add_step)
    print(fold_line(str(verdict), terminal_width(sys.stdout), 0))
    text = render_html(
        collect_page_data(
            history, recording.header, str(verdict), is_complete=recording.is_complete
        )
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ModelError(f"--html {shorten(path)}: cannot be written: {error.strerror}") from error
    return int(verdict.divergence is not None)
