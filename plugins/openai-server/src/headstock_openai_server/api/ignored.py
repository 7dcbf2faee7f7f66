"""The fields of a request that have no effect."""

from __future__ import annotations

import re

INDEX = re.compile(r"\[\d+\]")


class IgnoredFields:
    """The fields of one request that have no effect, by their paths without indices.

    refuses: such fields are refused
    """

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.paths: set[str] = set()

    def add(self, path: str) -> None:
        """Note the field at `path`."""
        self.paths.add(INDEX.sub("[]", path))
