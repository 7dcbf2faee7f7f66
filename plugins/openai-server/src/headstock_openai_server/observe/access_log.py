"""The access log: a JSON line for each request."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from headstock import ModelError
from headstock.errors import shorten
from headstock.logs import log_event

LOG = logging.getLogger("headstock.serve")

STANDARD_OUTPUT = "-"
OFF = "off"


class AccessLog:
    """Writes lines to a file, to standard output for "-", or nowhere for "off".

    A log that can no longer be written is turned off after one warning; requests continue.
    raises: ModelError when the file cannot be opened
    """

    def __init__(self, target: str) -> None:
        self.file: TextIO | None = None
        try:
            if target == STANDARD_OUTPUT:
                self.file = sys.stdout
            elif target != OFF:
                self.file = open(target, "a", encoding="utf-8")  # noqa: SIM115 - until `close`
        except OSError as error:
            raise ModelError(
                f"--access-log {shorten(target)}: cannot be written: {error.strerror}"
            ) from error

    def write(self, line: str) -> None:
        """Write one line."""
        if self.file is None:
            return
        try:
            self.file.write(f"{line}\n")
            self.file.flush()
        except (OSError, ValueError) as error:
            self.file = None
            LOG.warning(log_event("the access log ends"), exc_info=error)

    def close(self) -> None:
        """Close a file; standard output stays open."""
        if self.file is not None and self.file is not sys.stdout:
            self.file.close()
        self.file = None
