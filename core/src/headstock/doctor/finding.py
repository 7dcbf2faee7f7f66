"""What a check found; a check that fails itself does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import TypeVar

from attrs import frozen

from headstock.errors import HeadstockError, describe_error

T = TypeVar("T")


class Status(Enum):
    """PASS: works. WARN: works, but something is missing or slower. FAIL: has to be repaired."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


@frozen
class Finding:
    """One line of the doctor's report; `hint` is the next move, empty when there is nothing to do.

    `exit_code`, of a FAIL: with what `headstock run` would end because of it; None when it would
        not, or may not.
    `code`, of a plugin that cannot run here: that of its `Rejection`, for scripts.
    """

    status: Status
    subject: str
    text: str
    hint: str = ""
    exit_code: int | None = None
    code: str = ""


Check = Callable[[], Iterable[Finding]]


def pass_finding(subject: str, text: str) -> Finding:
    """Make the finding that all is well."""
    return Finding(Status.PASS, subject, text)


def warn_finding(subject: str, text: str, hint: str, code: str = "") -> Finding:
    """Make the finding that something is missing or slow."""
    return Finding(Status.WARN, subject, text, hint, code=code)


def fail_finding(subject: str, text: str, hint: str, exit_code: int | None = None) -> Finding:
    """Make the finding that something is broken."""
    return Finding(Status.FAIL, subject, text, hint, exit_code)


def run_check(subject: str, check: Check) -> list[Finding]:
    """Run a check; when it breaks off, a FAIL that says why follows what it found so far."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except HeadstockError as error:
        findings.append(fail_finding(subject, str(error), "", error.exit_code))
    # SystemExit too: a plugin that ends the process at import must not end the checks.
    except (Exception, SystemExit) as error:
        findings.append(
            fail_finding(subject, describe_error(error), "the check itself broke off here")
        )
    return findings


def try_step(subject: str, function: Callable[[], T], problems: list[Finding]) -> T | None:
    """Call the function; return None when it raises a HeadstockError.

    writes: problems, the FAIL that says why
    """
    try:
        return function()
    except HeadstockError as error:
        problems.append(fail_finding(subject, str(error), "", error.exit_code))
        return None
