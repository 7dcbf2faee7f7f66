"""The files that a command reads and those that it writes are different ones."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from headstock.errors import UsageError, shown


def check_apart(files: Mapping[str, str | None]) -> None:
    """Raise UsageError when two of the paths, by what names them, lead to one file, before it is
    written over.
    """
    named: dict[str, str] = {}
    for name, path in files.items():
        if path is None or (which := identity(path)) is None:
            continue
        first = named.setdefault(which, name)
        if first != name:
            raise UsageError(
                f"{first} and {name} are both {shown(path)}, which would be written over; name "
                "another file"
            )


def identity(path: str) -> str | None:
    """What all names of a file have in common, links of both kinds; None for what keeps nothing, as
    a pipe.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # it is yet to be written, or to be refused
        return os.path.realpath(path)
    return f"{found.st_dev}:{found.st_ino}" if stat.S_ISREG(found.st_mode) else None
