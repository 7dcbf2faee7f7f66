"""Toy engines for the tests of this folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_engine import Toys, installed


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """The toy plugins, installed."""
    with installed(tmp_path_factory.mktemp("toys")) as toys_folder:
        yield toys_folder


@pytest.fixture(autouse=True)
def crash_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine writes when a step fails goes to the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
