"""`headstock replay`: a recorded schedule run again without a device."""

from __future__ import annotations

import sys

from headstock.cli.tables import fold_line, terminal_width
from headstock.config import FlagParser
from headstock.errors import CannotRun, UsageError
from headstock.record import read_recording, replay_recording, restore_limits

EPILOG = """
'headstock run --record FILE' and 'headstock bench --record FILE' make recordings; so does an engine
that dies. 'headstock replay-view FILE' draws them. Exit codes: 0 every plan came out as recorded,
1 one did not, 2 usage, 5 the recording has no beginning or its plugins are not installed, 6 the
file cannot be read.
"""

DRAWINGS = ("--html", "--timeline")
"""Flags of `headstock replay-view` that this command once had."""


def main(arguments: list[str]) -> int:
    """Run `headstock replay ARGUMENTS` and return the exit code.   raises: HeadstockError"""
    for word in arguments:
        if word.partition("=")[0] in DRAWINGS:
            flag = word.partition("=")[0]
            raise UsageError(f"'headstock replay-view FILE {flag} OUT' draws; replay has no {flag}")
    options = make_parser().parse_args(arguments)
    recording = read_recording(options.file, partial=options.partial)
    # A crash report keeps the last steps. A state cannot be made from them: the prefix index is the
    # plugin's own (docs/decisions/0010-recordings.md).
    if recording.first_step:
        raise CannotRun(
            f"{recording.name} begins with step {recording.first_step}, and a schedule can be run "
            "again from step 0 only; 'headstock replay-view FILE --timeline OUT.json' draws what "
            "is there"
        )
    verdict = replay_recording(recording, restore_limits(recording.header, check=options.check))
    print(fold_line(str(verdict), terminal_width(sys.stdout), 0))
    return int(verdict.divergence is not None)


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
        "--check", action="store_true", help="check the scheduler's invariants after every step"
    )
    root.add_argument("--partial", action="store_true", help="accept a file that breaks off")
    return root
