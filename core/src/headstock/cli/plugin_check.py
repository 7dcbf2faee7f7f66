"""`headstock plugins check`: the cases of a plugin, run and shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from headstock.cli.notes import print_note
from headstock.cli.process import reserve_output
from headstock.cli.tables import print_table
from headstock.errors import CannotRun, format_count
from headstock.registry import CONFORMANCE_LINE, InstalledPlugin

if TYPE_CHECKING:
    from headstock_conformance import CaseResult, CheckReport

CHECK_EPILOG = "It ends with 0 when all passed, 3 when a case failed, 5 when none can run here."
SLOW_SECONDS = 1.0
"""Cases that take longer show how long."""


def check_plugin(
    plugin: InstalledPlugin, device: str, *, opt: Sequence[str] = (), as_json: bool
) -> int:
    """Check a plugin, print what came of it, and return the exit code.

    raises: CannotRun where the checks are not installed; HeadstockError
    """
    if find_spec("headstock_conformance") is None:
        raise CannotRun(
            "'headstock plugins check' needs headstock-conformance, which is not installed; "
            f"install it with: {CONFORMANCE_LINE}"
        )
    # late: those who run and serve need no checks of plugins, and have none
    import headstock_conformance

    # With the distribution: a name that two provide is ambiguous only without it.
    name = f"{plugin.distribution}:{plugin.name}"
    with reserve_output(as_json):
        report = headstock_conformance.check_plugin(plugin.kind, name, device, opt=opt)
    if as_json:
        print(json.dumps({**report.to_plain(), "provided_by": _format_provider(plugin)}, indent=2))
    else:
        _show_report(plugin, report)
    return report.exit_code


def _show_report(plugin: InstalledPlugin, report: CheckReport) -> None:
    """Print a table of the cases, and on standard error how many passed."""
    rows = [(*_describe_result(result), result.reason) for result in report.results]
    print_table(("CASE", "RESULT", "WHY"), rows, sys.stdout)
    sys.stdout.flush()
    counts = {
        outcome.value: sum(result.outcome is outcome for result in report.results)
        for outcome in sorted({result.outcome for result in report.results}, key=str)
    }
    cases = format_count(len(report.results), "case")
    summary = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    print_note(
        f"{plugin.kind} {plugin.name} of {_format_provider(plugin)} on {report.device}: "
        f"{cases}, {summary}"
    )


def _describe_result(result: CaseResult) -> tuple[str, str]:
    """The case, and its outcome with the time of a slow one."""
    slow = f" ({result.seconds:.0f} s)" if result.seconds >= SLOW_SECONDS else ""
    return result.case, f"{result.outcome.value}{slow}"


def _format_provider(plugin: InstalledPlugin) -> str:
    """The distribution and its version."""
    return f"{plugin.distribution} {plugin.version}"
