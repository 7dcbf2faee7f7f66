"""What a start says while FlashInfer compiles."""

from __future__ import annotations

import threading
import time

import pytest

from headstock_fi import announce
from headstock_fi.announce import announced


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings."""
    lines: list[str] = []
    monkeypatch.setattr(announce.LOG, "warning", lambda message, *facts: lines.append(message % facts))
    return lines


def test_kernels_that_take_long_are_named_before_they_are_ready(told: list[str]) -> None:
    with announced("decode", patience=0.01):
        deadline = time.monotonic() + 10
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        (line,) = told
        assert line.startswith("flashinfer's kernels for decode are not ready: at a first start it compiles them")
    assert told[1].startswith("flashinfer's kernels for decode are ready after 0.")


def test_kernels_that_are_there_are_no_news_and_errors_pass(told: list[str]) -> None:
    before = threading.active_count()
    with announced("decode"):
        pass
    with pytest.raises(ValueError, match="no nvcc"), announced("decode"):
        raise ValueError("no nvcc")
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told == [] and threading.active_count() == before
