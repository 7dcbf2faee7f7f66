"""Log lines as key=value pairs.

The command line shows them; in a program that imports headstock, logging stays its own.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from attrs import frozen

__all__ = ["LogEvent", "StderrHandler", "log_event", "show_library_logs", "show_logs"]

ROOT_LOGGER = "headstock"
MAX_LINE_LENGTH = 400
"""Characters of a line above DEBUG: the error of a compiler alone may have a hundred thousand."""
VALUE_LENGTHS = (240, 160, 120, 80, 64, 48, 32)
"""Limits of a line's longest values, tried in order until the line is short enough."""
PLAIN_TEXT = re.compile(r"[\w.,:/+@%-]+")
"""Text that needs no quotes in a log line."""


@frozen
class LogEvent:
    """The message of a log record: what happened, and facts about it."""

    name: str
    facts: Mapping[str, object]

    def __str__(self) -> str:
        return _format_pairs({"event": self.name, **self.facts})


def log_event(name: str, /, **facts: object) -> LogEvent:
    """A log message with facts, as in `LOG.info(log_event("pool ready", pages=1024))`.

    Its text is made only when a handler shows the record.
    """
    return LogEvent(name, facts)


def _format_pairs(facts: Mapping[str, object], most: int | None = None) -> str:
    """The facts as `key=value` on one line; other text than PLAIN_TEXT is quoted as in JSON.

    A value keeps its first `most` characters.
    """
    return " ".join(f"{key}={_quote_text(value, most)}" for key, value in facts.items())


def _quote_text(value: object, most: int | None = None) -> str:
    """A value as a log line shows it, cut to `most` characters before it is quoted."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if most is not None and len(text) > most:
        text = text[: most - 3] + "..."
    return text if PLAIN_TEXT.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _format_line(facts: Mapping[str, object]) -> str:
    """The facts on one line of at most MAX_LINE_LENGTH characters, the longest values cut first."""
    line = _format_pairs(facts)
    for most in VALUE_LENGTHS:
        if len(line) <= MAX_LINE_LENGTH:
            return line
        line = _format_pairs(facts, most)
    return line[:MAX_LINE_LENGTH]


class _KeyValueFormatter(logging.Formatter):
    """Formats a record as one line: time (UTC), level, logger, event, facts, error.

    A line has at most MAX_LINE_LENGTH characters. With DEBUG nothing is cut, and an exception
    brings its traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        message = (
            record.msg if isinstance(record.msg, LogEvent) else LogEvent(record.getMessage(), {})
        )
        verbose = logging.getLogger(ROOT_LOGGER).isEnabledFor(logging.DEBUG)
        tail: dict[str, object] = {}
        if record.exc_info and record.exc_info[1] is not None:
            tail["error"] = f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
            if verbose:
                tail["traceback"] = self.formatException(record.exc_info)
        facts = {**head, "event": message.name, **message.facts, **tail}
        return _format_pairs(facts) if verbose else _format_line(facts)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which progress bars and tests replace for a time."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignore the stream: it is looked up when a line is written."""


def show_logs(level: str, least: str = "NOTSET") -> None:
    """Show headstock's log lines from `level` on standard error, and none below `least`.

    It is for programs, not for libraries. A second call only changes the level.
    writes: the logger "headstock", and no other
    """
    levels = logging.getLevelNamesMapping()
    logger = logging.getLogger(ROOT_LOGGER)
    logger.setLevel(max(levels[level], levels[least]))
    # Handlers of the root logger, which a library may have set, would print each line again.
    logger.propagate = False
    _add_handler(logger)


def show_library_logs() -> None:
    """Show what other libraries log or warn of as lines like headstock's, from WARNING.

    It is for programs whose standard error other programs read.
    writes: the root logger, and `warnings.showwarning`
    """
    logging.captureWarnings(True)
    _add_handler(logging.getLogger())


def _add_handler(logger: logging.Logger) -> None:
    """Write the logger's lines to standard error, unless it does already."""
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        handler = StderrHandler()
        handler.setFormatter(_KeyValueFormatter())
        logger.addHandler(handler)
