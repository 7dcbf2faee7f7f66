"""Commands in a pseudo-terminal of 80 columns, as somebody who types sees them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pexpect

CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[=>]")
"""What moves the cursor or changes the colour, and shows nothing."""

PROMPTS = r"\x1b\[\?2004h"
"""What an editor sends when it is ready for keys: pasted texts shall be marked."""


def headstock(
    *arguments: str, state: Path | None = None, columns: int = 80, **variables: str
) -> pexpect.spawn:
    """`headstock ARGUMENTS` in a terminal; `state` is where it may remember things."""
    environment = os.environ | {
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(state or os.devnull),
    }
    environment.pop("COLUMNS", None)
    environment.pop("NO_COLOR", None)
    environment.update(variables)
    command = [sys.executable, "-m", "headstock", *arguments]
    return pexpect.spawn(
        command[0],
        command[1:],
        env=environment,
        dimensions=(40, columns),
        timeout=600,
        encoding="utf-8",
    )


def shown(*arguments: str, columns: int = 80) -> tuple[int, list[str]]:
    """The exit code of a command that asks nothing, and the lines that a terminal shows of it."""
    process = headstock(*arguments, columns=columns)
    text = process.read()
    process.close()
    code = process.exitstatus
    assert isinstance(code, int)
    written = (CONTROL.sub("", line.rstrip("\r")) for line in text.split("\n"))
    # a bar is drawn over the one before it
    return code, [line.rpartition("\r")[2].rstrip() for line in written]
