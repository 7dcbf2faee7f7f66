"""The cases of a plugin check, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from attrs import field, frozen

from headstock.errors import (
    CannotRun,
    PluginBroken,
    describe_error,
    describe_location,
    shorten,
)

MAX_REASON = 400
"""Maximum length of the reason of a failed case."""


@frozen
class Case:
    """One requirement on a plugin.

    name: what it is
    run: raises AssertionError with the fault, any exception of the plugin, or CannotRun if this
        machine cannot run it
    """

    name: str
    run: Callable[[], object] = field(repr=False)

    def __str__(self) -> str:
        return self.name


class Outcome(Enum):
    """The status of a case. NOT_HERE: the plugin refuses it on this machine."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_HERE = "not here"


@frozen(kw_only=True)
class CaseResult:
    """The result of a case; the reason is one line, empty if it passed."""

    case: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0


@frozen(kw_only=True)
class CheckReport:
    """The results of all cases of a plugin, in order."""

    kind: str
    name: str
    device: str
    results: tuple[CaseResult, ...]

    def count(self, outcome: Outcome) -> int:
        """The number of cases with this status."""
        return sum(result.outcome is outcome for result in self.results)

    @property
    def exit_code(self) -> int:
        """0 if all cases that can run here passed, 3 if one failed, 5 if none can run."""
        if self.count(Outcome.FAILED):
            return PluginBroken.exit_code
        return 0 if self.count(Outcome.PASSED) else CannotRun.exit_code

    def to_plain(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "kind": self.kind,
            "name": self.name,
            "device": self.device,
            "passed": self.count(Outcome.PASSED),
            "failed": self.count(Outcome.FAILED),
            "not_here": self.count(Outcome.NOT_HERE),
            "cases": [
                {
                    "case": result.case,
                    "outcome": result.outcome.value,
                    "reason": result.reason,
                    "seconds": round(result.seconds, 3),
                }
                for result in self.results
            ],
        }


def run_cases(cases: Iterable[Case]) -> tuple[CaseResult, ...]:
    """Run the cases in turn; a failed case does not stop the next ones."""
    return tuple(run_case(case) for case in cases)


def run_case(case: Case) -> CaseResult:
    """Run one case."""
    start = time.perf_counter()
    outcome, reason = Outcome.PASSED, ""
    try:
        case.run()
    except CannotRun as error:
        outcome, reason = Outcome.NOT_HERE, shorten(error, MAX_REASON)
    # SystemExit too: a plugin that calls sys.exit has not passed.
    except (Exception, SystemExit) as error:
        outcome, reason = Outcome.FAILED, shorten(explain_failure(error), MAX_REASON)
    return CaseResult(
        case=case.name, outcome=outcome, reason=reason, seconds=time.perf_counter() - start
    )


def explain_failure(error: BaseException) -> str:
    """Why a case failed, on one line."""
    if isinstance(error, PluginBroken) or (isinstance(error, AssertionError) and str(error)):
        return str(error)
    return f"{describe_error(error)} in {describe_location(error)}"
