"""What commands say beside their answers, on standard error: notes and log lines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from headstock.cli.tables import fold_line, terminal_width
from headstock.logs import show_logs

if TYPE_CHECKING:
    from headstock.config import ResolvedConfig


def start_logs(resolved: ResolvedConfig, *, quiet: bool) -> None:
    """Show log lines from the level in effect.

    Under `--quiet` they begin at WARNING, unless `--log-level` is given too.
    """
    # A level in a file or variable is for every run, and --quiet for this one.
    is_from_flag = resolved.origins["log_level"] == "flag --log-level"
    show_logs(resolved.engine.log_level, least="NOTSET" if is_from_flag or not quiet else "WARNING")


def print_note(text: str) -> None:
    """Print one line on standard error, broken between words where a terminal is narrower."""
    print(
        fold_line(" ".join(text.split()), terminal_width(sys.stderr), 0),
        file=sys.stderr,
        flush=True,
    )
