"""tests/broken-plugins.md says how runs of broken plugins end, and debug flags let none pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen
from broken_parts.cases import CASES, Broken
from broken_parts.outcome import Outcome, run_case
from broken_parts.specs import install
from broken_table import HEAD, PAGE, list_paths, make_cells, make_row

LEAST = 40
"""Broken plugins that the page has at least."""
BY_DEFAULT = CASES[::10]
ROWS = PAGE.read_text().partition(HEAD)[2].splitlines()


@frozen
class Parts:
    """The folder of the broken plugins' metadata, and what sound ones answer."""

    folder: Path
    sound: Outcome


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    folder = tmp_path_factory.mktemp("broken")
    install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        # For the process that compiles a grammar first.
        patch.setenv("PYTHONPATH", os.pathsep.join(list_paths(folder)))
        yield Parts(folder, run_case(None, folder, debug=False))


def check(parts: Parts, case: Broken) -> None:
    """Compare both runs of a case with its row of the page."""
    cells = make_cells(case, parts.folder, parts.sound)
    assert not cells[1].startswith("0"), "a broken plugin passes with the debug flags"
    assert cells[1].endswith("names the plugin"), "the error does not name the plugin"
    row = make_row(case, cells).rstrip("\n")
    assert row == ROWS[CASES.index(case)], "python tests/broken_table.py writes the page anew"


@pytest.mark.feature("R8")
def test_sound_plugins_pass_under_the_debug_flags(parts: Parts) -> None:
    assert run_case(None, parts.folder, debug=True) == parts.sound


def test_the_page_has_a_row_for_each_broken_plugin() -> None:
    assert len(ROWS) == len(CASES) >= LEAST
    assert len({(case.kind, case.name) for case in CASES}) == len(CASES)


@pytest.mark.feature("R8")
@pytest.mark.parametrize("case", BY_DEFAULT, ids=lambda case: f"{case.kind}-{case.name}")
def test_some_broken_plugins_end_as_the_page_says(parts: Parts, case: Broken) -> None:
    check(parts, case)


@pytest.mark.feature("R8")
@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case not in BY_DEFAULT],
    ids=lambda case: f"{case.kind}-{case.name}",
)
def test_every_broken_plugin_ends_as_the_page_says(parts: Parts, case: Broken) -> None:
    check(parts, case)
