"""`headstock doctor`: what works on this machine, and how to fix the rest."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable

from headstock.cli.process import reserve_output
from headstock.cli.tables import fold_line, terminal_width
from headstock.config.flag_parser import FlagParser
from headstock.config.flags import add_engine_flags, resolve_flags
from headstock.doctor import Finding, Status, run_checks
from headstock.errors import CannotRun

EPILOG = """
Exit codes: 0 nothing failed; otherwise the one with which 'headstock run' would refuse these flags,
such as 6 for a model that cannot be read, or 5 for whatever else has to be repaired.
"""


SUBJECT_WIDTH = 25
"""Characters of the longest subject, "model Qwen3MoeForCausalLM"."""


def main(arguments: list[str]) -> int:
    """Run `headstock doctor ARGUMENTS` and return the exit code.

    raises: UsageError
    """
    args = make_parser().parse_args(arguments)
    findings = run_checks(resolve_flags(args, os.environ).engine)
    if not args.json:
        return _choose_exit_code(print_findings(findings))
    with reserve_output():
        listed = list(findings)
    _print_json(listed)
    return _choose_exit_code(listed)


def make_parser() -> FlagParser:
    """The parser of `headstock doctor`."""
    about = (
        "Check what works on this machine, and whether it can serve the model with these flags. "
        "WARN does not prevent serving."
    )
    root = FlagParser(prog="headstock doctor", description=about, epilog=EPILOG)
    root.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_engine_flags(root)
    return root


def _choose_exit_code(findings: Iterable[Finding]) -> int:
    """0 when nothing failed; else the code with which `run` would end, or 5 when `run` has none."""
    codes = [finding.exit_code for finding in findings if finding.status is Status.FAIL]
    return next((code for code in codes if code is not None), CannotRun.exit_code if codes else 0)


def _print_json(findings: list[Finding]) -> None:
    """Print the findings as JSON."""
    print(json.dumps([_finding_to_json(finding) for finding in findings], indent=2))


def print_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Print each finding at once, then how many there are of each status; the same findings."""
    printed = []
    width = terminal_width(sys.stdout)
    for finding in findings:
        hint = f"  ({finding.hint})" if finding.hint else ""
        line = f"{finding.status.value}  {finding.subject:{SUBJECT_WIDTH}}  {finding.text}{hint}"
        # Flushed: the next check may import libraries for seconds.
        print(fold_line(line, width, SUBJECT_WIDTH + 8), flush=True)
        printed.append(finding)
    counts = Counter(finding.status for finding in printed)
    print(", ".join(f"{counts[status]} {status.value}" for status in Status))
    return printed


def _finding_to_json(finding: Finding) -> dict[str, str]:
    """A finding for JSON."""
    return {
        "status": finding.status.value,
        "subject": finding.subject,
        "text": finding.text,
        "hint": finding.hint,
        "code": finding.code,
    }
