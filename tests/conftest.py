"""What holds for all tests."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PathDistribution
from typing import Any

import pytest
from hypothesis import settings
from unseen import leave_out_of_collections

# A deadline would judge how busy the machine is. `@settings(...)` takes the rest from the profile
# that is loaded when it runs, so this comes before any test module is imported.
# Where CI is set, examples are the same in each run, so that a change is not refused for an old
# fault; runs by hand and `nox -s full` look for new ones.
settings.register_profile(
    "headstock", deadline=None, max_examples=40, derandomize=bool(os.environ.get("CI"))
)
settings.register_profile(
    "full", settings.get_profile("headstock"), max_examples=250, derandomize=False
)
settings.load_profile("headstock")

# A shell starts what runs in the background with SIGINT ignored, and processes inherit that: a test
# of Ctrl-C would never end.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests go first: the last one to start keeps one process busy while the other waits."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    leave_out_of_collections()


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


def parse_once(parsed: property) -> property:
    """The property of distributions, parsed once for each that is installed beside Python."""
    results: dict[str, Any] = {}

    def parse(distribution: Any) -> Any:
        folder = str(distribution._path)
        if not folder.startswith(sys.prefix):
            return parsed.__get__(distribution)
        if folder not in results:
            results[folder] = parsed.__get__(distribution)
        return results[folder]

    return property(parse)


@pytest.fixture(autouse=True, scope="session")
def steady_packages() -> Iterator[None]:
    """Tests install plugins in folders of their own: what is beside Python stays as it is.

    An engine's start parses the metadata of all of it several times, which takes most of the start.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("metadata", "entry_points"):
            patch.setattr(PathDistribution, name, parse_once(getattr(PathDistribution, name)))
        yield
