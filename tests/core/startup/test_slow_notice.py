"""What a start says while it takes long."""

from __future__ import annotations

import logging
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from headstock.startup import pool_memory
from headstock.startup.profile_run import ProfileProgress, slow_notice


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_stage_that_takes_long_is_named_before_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    with slow_notice("measuring", "kernels are compiled", seconds_until_notice=0.01):
        deadline = time.monotonic() + 600
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lines(caplog) == ['event="still measuring" because="kernels are compiled"']
    assert lines(caplog)[1].startswith('event="done measuring" seconds=0')
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_stage_that_is_quick_is_no_news_and_errors_pass(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    with (
        pytest.raises(ValueError, match="no nvcc"),
        slow_notice("measuring", "kernels are compiled"),
    ):
        raise ValueError("no nvcc")
    deadline = time.monotonic() + 600
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines(caplog) == [] and threading.active_count() == before


def test_the_profile_run_on_a_device_says_that_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(*inputs: object) -> str:
        deadline = time.monotonic() + 600
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        return "measured"

    monkeypatch.setattr(
        pool_memory, "slow_notice", lambda *words: slow_notice(*words, seconds_until_notice=0.01)
    )
    monkeypatch.setattr(pool_memory, "measure_memory_use", measure)

    parts = SimpleNamespace(attention_name="fa,fi", ops=SimpleNamespace(name="triton"))
    material: Any = SimpleNamespace(parts=parts)
    shape: Any = None

    use: object = pool_memory.profile_memory_use(material, shape, 1)
    assert use == "measured"
    assert "kernels of fa,fi, triton that are new on this machine are compiled" in lines(caplog)[0]


def test_a_profile_run_is_a_bar_that_moves_while_a_kernel_is_compiled() -> None:
    told: list[tuple[str, int, int]] = []
    many = threading.Event()

    def note(*parts: Any) -> None:
        told.append(parts)
        if len(told) > 4:
            many.set()

    threads = threading.active_count()
    with ProfileProgress(note, seconds=0.01) as progress:
        assert many.wait(600)
        progress.set_parts(1, 9)
    assert {parts[1:] for parts in told} == {(0, 2), (1, 9)} and told[-1][1:] == (1, 9)
    assert all(
        re.fullmatch(r"memory plan, \d+ s; new kernels are compiled", stage) for stage, *_ in told
    )
    assert threading.active_count() == threads

    with ProfileProgress(None) as silent:
        silent.set_parts(1, 2)
        assert threading.active_count() == threads
