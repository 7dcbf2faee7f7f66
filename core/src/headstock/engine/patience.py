"""Telling people what a start is busy with when it takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

from headstock.logs import event

LOG = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds for which nobody wants a reason."""


@contextmanager
def announced(stage: str, reason: str, patience: float = PATIENCE) -> Iterator[None]:
    """Log the stage, and why it may take long, once `patience` seconds have passed, and how long it
    took in the end.
    """
    began = time.monotonic()
    notice = Timer(patience, LOG.warning, [event(f"still {stage}", because=reason)])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()
        seconds = time.monotonic() - began
        if seconds > patience:
            LOG.warning(event(f"done {stage}", seconds=round(seconds, 1)))
