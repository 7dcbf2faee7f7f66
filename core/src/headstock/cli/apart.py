"""The files that a command reads and those that it writes are different ones."""

from __future__ import annotations

import os
from collections.abc import Mapping

from headstock.errors import UsageError, shown


def check_apart(files: Mapping[str, str | None]) -> None:
    """Raise UsageError when two of the paths, by what names them, lead to one file, before it is written over."""
    named: dict[str, str] = {}
    for name, path in files.items():
        if path is None:
            continue
        first = named.setdefault(os.path.realpath(path), name)
        if first != name:
            raise UsageError(
                f"{first} and {name} are both {shown(path)}, which would be written over; name another file"
            )
