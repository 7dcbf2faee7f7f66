"""`headstock doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable

from headstock.cli.tables import fold_line, terminal_width
from headstock.config.flags import FlagParser, add_engine_flags, resolve_flags
from headstock.doctor import Finding, Status, run_checks
from headstock.errors import CannotRun

EPILOG = """
Exit codes: 0 nothing failed; otherwise the one with which 'headstock run' would refuse these flags,
such as 6 for a model that cannot be read, or 5 for whatever else has to be repaired.
"""


SUBJECT_WIDTH = 25
"""Characters of the longest subject, "model Qwen3MoeForCausalLM"."""


def main(arguments: list[str]) -> int:
    """Run `headstock doctor ARGUMENTS`; 0 when nothing failed, else as `run` would end, or 5.

    raises: UsageError
    """
    asked = make_parser().parse_args(arguments)
    found = run_checks(resolve_flags(asked, os.environ).engine)
    return choose_exit_code(print_json(list(found)) if asked.json else print_findings(found))


def make_parser() -> FlagParser:
    """The parser of `headstock doctor`."""
    about = (
        "What works on this machine, and whether the model can be served as the flags ask; "
        "WARN is no obstacle."
    )
    root = FlagParser(prog="headstock doctor", description=about, epilog=EPILOG)
    root.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_engine_flags(root)
    return root


def choose_exit_code(found: Iterable[Finding]) -> int:
    """0 when nothing failed; else the code that `run` would end with, the first of them, or 5."""
    codes = [each.exit_code for each in found if each.status is Status.FAIL]
    return next((code for code in codes if code is not None), CannotRun.exit_code if codes else 0)


def print_json(found: list[Finding]) -> list[Finding]:
    """Print the findings for programs; the same findings."""
    print(json.dumps([finding_to_json(each) for each in found], indent=2))
    return found


def print_findings(found: Iterable[Finding]) -> list[Finding]:
    """Print the findings, each at once, and how many there are of each status; the same
    findings.
    """
    printed = []
    width = terminal_width(sys.stdout)
    for each in found:
        hint = f"  ({each.hint})" if each.hint else ""
        line = f"{each.status.value}  {each.subject:{SUBJECT_WIDTH}}  {each.text}{hint}"
        print(fold_line(line, width, SUBJECT_WIDTH + 8), flush=True)
        printed.append(each)
    counts = Counter(each.status for each in printed)
    print(", ".join(f"{counts[status]} {status.value}" for status in Status))
    return printed


def finding_to_json(finding: Finding) -> dict[str, str]:
    """A finding for JSON."""
    return {
        "status": finding.status.value,
        "subject": finding.subject,
        "text": finding.text,
        "hint": finding.hint,
    }
