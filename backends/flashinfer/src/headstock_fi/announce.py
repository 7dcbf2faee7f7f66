"""Telling people why a start takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

LOG = logging.getLogger("headstock.fi")

PATIENCE = 3.0
"""Seconds in which kernels that are compiled already are loaded."""


@contextmanager
def announced(kernels: str, patience: float = PATIENCE) -> Iterator[None]:
    """Log what is being made ready when that takes longer than `patience` seconds, and how long it took."""
    began = time.monotonic()
    said = "flashinfer's kernels for %s are not ready: at a first start it compiles them, and keeps them afterwards"
    notice = Timer(patience, LOG.warning, (said, kernels))
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
    seconds = time.monotonic() - began
    if seconds > patience:
        LOG.warning("flashinfer's kernels for %s are ready after %.1f s", kernels, seconds)
