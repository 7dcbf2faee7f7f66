"""What may be written to a stream beside its text."""

from __future__ import annotations

import os
from typing import TextIO


def can_draw(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that knows escape sequences, to move the cursor by."""
    # One that has no name is taken for dumb, as git does.
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def can_style(stream: TextIO) -> bool:
    """Whether text of `stream` may be coloured, bold or dim."""
    return can_draw(stream) and not os.environ.get("NO_COLOR")  # the convention of no-color.org
