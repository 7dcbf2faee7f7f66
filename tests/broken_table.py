"""The table of tests/broken-plugins.md: how runs with each broken plugin end.

`python tests/broken_table.py` writes it to the page; tests/docs/test_broken_plugins.py compares.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("broken-plugins.md")
HEAD = "| kind | what is wrong | plain | with the debug flags |\n| --- | --- | --- | --- |\n"

for folder in ("support", "."):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from broken_parts.cases import CASES, Broken  # noqa: E402 - the path comes first
from broken_parts.outcome import Outcome, run_case  # noqa: E402
from broken_parts.specs import install  # noqa: E402


def make_cell(case: Broken, outcome: Outcome, sound: Outcome) -> str:
    """The exit code, and whether the error names the plugin or the text is right."""
    if outcome.exit_code:
        is_named = re.search(rf"{case.name}|broken[-_]parts", outcome.error)
        return f"{outcome.exit_code}: names {'the plugin' if is_named else 'core alone'}"
    return "0: right text" if outcome.tokens == sound.tokens else "0: **wrong text**"


def make_cells(case: Broken, folder: Path, sound: Outcome) -> tuple[str, str]:
    """How a plain run ends, and one with the debug flags."""
    plain = "undefined text"
    if not case.is_undefined:
        plain = make_cell(case, run_case(case, folder, debug=False), sound)
    return plain, make_cell(case, run_case(case, folder, debug=True), sound)


def make_row(case: Broken, cells: tuple[str, str]) -> str:
    """The case's line of the table."""
    return f"| {case.kind} | {case.fault} | {cells[0]} | {cells[1]} |\n"


def list_paths(folder: Path) -> list[str]:
    """Where a process finds the broken plugins, and what it finds already."""
    paths = [str(folder), str(Path(__file__).parent / "support"), os.environ.get("PYTHONPATH", "")]
    return [path for path in paths if path]


def write_page() -> None:
    """Run all cases and write their table to the page."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        install(folder)
        sys.path.insert(0, name)
        os.environ["PYTHONPATH"] = os.pathsep.join(list_paths(folder))
        sound = run_case(None, folder, debug=False)
        rows = [make_row(case, make_cells(case, folder, sound)) for case in CASES]
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(HEAD)] + HEAD + "".join(rows))


if __name__ == "__main__":
    write_page()
