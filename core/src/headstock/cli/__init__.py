"""The command line, and what its commands share. Importing it does not import torch.

Names are imported when they are first used, so that `headstock --help` starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstock.cli.notes import print_note, start_logs
    from headstock.cli.process import check_distinct_files, reserve_output
    from headstock.cli.tables import fold_line, print_summary, print_table, terminal_width
    from headstock.requests.progress_bars import ProgressBars

__all__ = [
    "ProgressBars",
    "check_distinct_files",
    "fold_line",
    "print_note",
    "print_summary",
    "print_table",
    "reserve_output",
    "start_logs",
    "terminal_width",
]

_HOMES = {
    "ProgressBars": "headstock.requests.progress_bars",
    "check_distinct_files": "headstock.cli.process",
    "fold_line": "headstock.cli.tables",
    "print_note": "headstock.cli.notes",
    "print_summary": "headstock.cli.tables",
    "print_table": "headstock.cli.tables",
    "reserve_output": "headstock.cli.process",
    "start_logs": "headstock.cli.notes",
    "terminal_width": "headstock.cli.tables",
}


def __getattr__(name: str) -> object:
    """The shared name, from the module where it lives."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headstock.cli' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
