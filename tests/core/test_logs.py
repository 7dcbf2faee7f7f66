"""Log lines."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from headstock.logs import ROOT_LOGGER, StderrHandler, log_event, show_logs

LOG = logging.getLogger("headstock.somewhere")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """The logger is put back afterwards."""
    logger = logging.getLogger(ROOT_LOGGER)
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate = propagate
    logger.handlers[:] = handlers


@pytest.mark.feature("S24")
def test_debug_lines_appear_at_level_debug(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs("INFO")
    LOG.debug(log_event("quiet"))
    assert capsys.readouterr().err == ""
    show_logs("DEBUG")
    LOG.debug(log_event("loud"))
    assert capsys.readouterr().err.endswith("level=debug logger=headstock.somewhere event=loud\n")


@pytest.mark.feature("S24")
def test_lines_are_structured(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs("INFO")
    LOG.info(log_event("pool ready", pages=10, ratio=0.5, note='two\nlines "quoted"', empty=""))
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert re.match(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=info ", line)
    pairs = dict(word.split("=", 1) for word in shlex.split(line))
    assert (pairs["event"], pairs["pages"], pairs["ratio"], pairs["empty"]) == (
        "pool ready",
        "10",
        "0.5",
        "",
    )
    assert pairs["note"] == 'two\\nlines "quoted"'


def test_plain_messages_and_exceptions(capsys: pytest.CaptureFixture[str]) -> None:
    show_logs("INFO")
    LOG.info("%d rows", 3)
    assert 'event="3 rows"' in capsys.readouterr().err
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        LOG.exception(log_event("step failed"))
        line = capsys.readouterr().err
        assert line.endswith('event="step failed" error="ValueError: bad\\nvalue"\n')
        show_logs("DEBUG")
        LOG.exception(log_event("step failed"))
    line = capsys.readouterr().err
    assert "traceback=" in line
    assert line.count("\n") == 1


def test_only_headstocks_own_logger_is_touched() -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    show_logs("DEBUG")
    show_logs("INFO")
    assert (root.level, list(root.handlers)) == before
    assert (
        len(
            [
                handler
                for handler in logging.getLogger(ROOT_LOGGER).handlers
                if isinstance(handler, StderrHandler)
            ]
        )
        == 1
    )


def test_a_line_is_bounded_and_whole_at_level_debug(capsys: pytest.CaptureFixture[str]) -> None:
    error = RuntimeError("ptxas \n" * 20_000)
    facts = {
        "step": 7,
        "rows": 3,
        "at": "/some/folder/" * 20,
        "recording": "the last 7 steps are in /tmp/x" * 9,
    }
    for level, most in (("WARNING", 400), ("DEBUG", None)):
        show_logs(level)
        LOG.error(log_event("step failed", **facts), exc_info=error)
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "step=7 rows=3" in line and "RuntimeError: ptxas" in line
        assert (len(line) <= 401) if most else (len(line) > 140_000)
    show_logs("INFO")
    LOG.warning(log_event("facts", **{f"key{number}": "x" * 100 for number in range(40)}))
    assert len(capsys.readouterr().err) == 401


def test_warnings_and_lines_of_libraries_look_like_headstocks_own() -> None:
    code = """
import logging, warnings
from headstock.logs import show_library_logs, show_logs
show_logs("INFO")
show_library_logs()
show_library_logs()
warnings.warn("two\\nlines")
logging.getLogger("asyncio").error("a task %s", "failed")
logging.getLogger("asyncio").info("not shown")
logging.getLogger("headstock.x").info("once")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    warned, failed, own = done.stderr.splitlines()
    assert re.match(r"time=\S+Z level=warning logger=py\.warnings event=.*two\\nlines", warned)
    assert re.match(r'time=\S+Z level=error logger=asyncio event="a task failed"$', failed)
    assert own.endswith("level=info logger=headstock.x event=once")
