"""What holds for all tests."""

from __future__ import annotations

import gc
import logging
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A deadline would judge how busy the machine is. `@settings(...)` takes the rest from the profile
# that is loaded when it runs, so this comes before any test module is imported.
settings.register_profile("headstock", deadline=None)
settings.load_profile("headstock")

# A shell starts what runs in the background with SIGINT ignored, and processes inherit that: a test
# of Ctrl-C would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import stay as long as the process: a full collection that
    looked at them took a third of a second, and each engine that is built asks for some.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Recordings that dying engines leave behind, here and in other processes, go the way of
    pytest's own files.
    """
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("TMPDIR", folder)
        yield


@pytest.fixture(autouse=True)
def unchanged_logs() -> Iterator[None]:
    """A command that ran in this process leaves later tests the log lines that they look for."""
    logger = logging.getLogger("headstock")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate
