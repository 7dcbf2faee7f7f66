"""Tables and long lines, fitted to a terminal's width; other readers get one line a record."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal, TextIO

from headstock.requests.terminal import can_style

MAX_UNBROKEN_CELL = 40
"""Characters up to which a column of a table is never broken: names and versions are not, sentences
are.
"""
SUMMARY_INDENT = 10
"""Characters before what the lines of a start-up summary say."""
QUOTED_COMMAND = re.compile(r"(?<!\w)'[a-z][^']*'(?!\w)")
"""A command within a sentence: 'headstock doctor'."""
PROGRAM_COMMAND = re.compile(r"(?:pip install [^;]*? && )?python3? -c \".*$")
"""A command that holds a program; nothing follows it."""
UNBROKEN_SPACE = "\0"
"""Stands for a space where a line may not be broken."""
LEAST_BROKEN_CELL = 6
"""Characters that a column whose cells are broken has at least."""
MIN_WIDTH = 20
"""Columns below which nothing is fitted: a terminal that narrow does not know its width."""


def terminal_width(stream: TextIO) -> int | None:
    """The columns of the terminal behind `stream`; None for others, or for an unknown width."""
    if not stream.isatty():
        return None
    # The variable first, as in Python's shutil: it lets users and tests state a width.
    stated = os.environ.get("COLUMNS", "")
    try:
        width = int(stated) if stated.isdecimal() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
    return width if width >= MIN_WIDTH else None


def fold_line(line: str, width: int | None, indent: int) -> str:
    """`line` broken between words into lines of `width`, all but the first indented.

    Without a width the line stays whole. So does a word longer than a line, and a quoted command,
    so that it can be copied. A command with a program gets its own line.
    """
    if width is None or len(line) <= width:
        return line
    program = PROGRAM_COMMAND.search(line)
    if program:
        sentence = line[: program.start()].rstrip()
        return "\n".join(
            filter(None, (fold_line(sentence, width, indent), line[program.start() :]))
        )
    wrapper = textwrap.TextWrapper(
        width=width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )
    # textwrap breaks at spaces alone, so a quoted command goes through it without any.
    unbroken = QUOTED_COMMAND.sub(lambda command: command[0].replace(" ", UNBROKEN_SPACE), line)
    return "\n".join(wrapper.wrap(unbroken)).replace(UNBROKEN_SPACE, " ")


def print_summary(lines: Iterable[str]) -> None:
    """Print an engine's start-up summary on standard error, folded to a terminal's width."""
    width = terminal_width(sys.stderr)
    for line in lines:
        print(fold_line(line, width, SUMMARY_INDENT), file=sys.stderr)
    sys.stderr.flush()


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    stream: TextIO,
    *,
    spare: Sequence[str] = (),
) -> None:
    """Print records under a header.

    spare: columns that a terminal too narrow for the records lacks: the first one, and each of the
        others while columns that are not broken leave no room
    """
    cells = [[str(cell) for cell in row] for row in rows]
    width = terminal_width(stream)
    if width is None:
        # Flushed, so that what follows on standard error comes behind it where both are one file.
        print("\n".join(_align_columns([list(header), *cells])), file=stream, flush=True)
        return
    for number, title in enumerate(spare):
        needed = _count_least(header, cells) if number else _count_whole(header, cells)
        if needed > width:
            left_out = list(header).index(title)
            header = [each for each in header if each != title]
            cells = [[*row[:left_out], *row[left_out + 1 :]] for row in cells]
    _print_fitted(header, cells, stream, width)


def _count_whole(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The columns of a terminal on which no cell is broken."""
    return max(map(len, _align_columns([header, *rows])))


def _count_least(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """The columns of a terminal on which no name is broken."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return sum(2 + (each if each <= MAX_UNBROKEN_CELL else LEAST_BROKEN_CELL) for each in widths)


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _print_fitted(
    header: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO, width: int
) -> None:
    """Print a table whose long cells are broken between words to keep within `width`."""
    from rich.console import Console  # only for a terminal: it takes a tenth of a second to import
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title, column in zip(
        header, zip(*rows, strict=True) if rows else [()] * len(header), strict=True
    ):
        whole = max((len(cell) for cell in column), default=0) <= MAX_UNBROKEN_CELL
        table.add_column(title, no_wrap=whole, overflow="fold")
    for row in rows:
        # Text, because rich takes brackets in a plain string for markup.
        table.add_row(*map(Text, row))
    color_system: Literal["auto"] | None = "auto" if can_style(stream) else None
    Console(file=stream, width=width, highlight=False, color_system=color_system).print(table)
