"""What a check found, and how a check that fails itself is kept from stopping the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

from attrs import frozen

from headstock.errors import CannotRun, reason


class Status(Enum):
    """PASS: works. WARN: works, but something is missing or slower. FAIL: has to be repaired."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@frozen
class Finding:
    """One line of the doctor's report; `hint` is the next move, empty when there is nothing to do.

    `exit_code`, of a FAIL: with what `headstock run` would end because of it, where that is known.
    """

    status: Status
    subject: str
    text: str
    hint: str = ""
    exit_code: int = CannotRun.exit_code


Check = Callable[[], Iterable[Finding]]


def passed(subject: str, text: str) -> Finding:
    """A finding that all is well."""
    return Finding(Status.PASS, subject, text)


def warned(subject: str, text: str, hint: str) -> Finding:
    """A finding that something is missing or slow."""
    return Finding(Status.WARN, subject, text, hint)


def failed(subject: str, text: str, hint: str, exit_code: int = CannotRun.exit_code) -> Finding:
    """A finding that something is broken."""
    return Finding(Status.FAIL, subject, text, hint, exit_code)


def findings(subject: str, check: Check) -> list[Finding]:
    """What the check found; when it breaks off, what it found so far and a FAIL that says why."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except (Exception, SystemExit) as error:
        text, code = reason(error), getattr(error, "exit_code", CannotRun.exit_code)
        found.append(failed(subject, text, "the check itself broke off here", code))
    return found
