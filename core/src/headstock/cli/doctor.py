"""`headstock doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable

from headstock.config.flags import FlagParser, add_engine_flags, resolve
from headstock.doctor import Finding, Status, examine
from headstock.errors import CannotRun


def main(arguments: list[str]) -> int:
    """Run `headstock doctor ARGUMENTS`; 0 when nothing failed, else 5.   raises: UsageError"""
    about = "What works on this machine, and whether the model can be served as the flags ask; WARN is no obstacle."
    parser = FlagParser(prog="headstock doctor", description=about)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_engine_flags(parser)
    asked = parser.parse_args(arguments)
    found = show(examine(resolve(asked, os.environ).engine), as_json=asked.json)
    return CannotRun.exit_code if Status.FAIL in found else 0


def show(found: Iterable[Finding], *, as_json: bool) -> Counter[Status]:
    """Print the findings, as text each at once; how many there are of each status."""
    if as_json:
        everything = list(found)
        print(json.dumps([entry(each) for each in everything], indent=2))
        return Counter(each.status for each in everything)
    counts: Counter[Status] = Counter()
    for each in found:
        counts[each.status] += 1
        hint = f"  ({each.hint})" if each.hint else ""
        print(f"{each.status.value}  {each.subject:24}  {each.text}{hint}", flush=True)
    print(", ".join(f"{counts[status]} {status.value}" for status in Status))
    return counts


def entry(finding: Finding) -> dict[str, str]:
    """A finding for JSON."""
    return {
        "status": finding.status.value,
        "subject": finding.subject,
        "text": finding.text,
        "hint": finding.hint,
    }
