"""docs/reliability.md names every class of failure, tests that exist, and every broken engine."""

from __future__ import annotations

import re

from core.mutants.test_mutants import MUTANTS
from feature_table import LINK, TESTS, all_tests

PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
CLASSES = "P1 P2 P3 P4 P5 P6 P7 P8 P9 P10 C1 C2 C3 C4 C5 C6 S9 S10".split()
TABLE = {cells[1].strip(): cells for line in PAGE.splitlines() if len(cells := line.split("|")) == 6 and cells[1:]}


def test_every_class_has_a_test_and_a_broken_engine_that_stands_for_it() -> None:
    for name in CLASSES:
        tests, broken = LINK.findall(TABLE[name][3]), TABLE[name][4].strip().split("<br>")
        assert tests and set(tests) <= {(test.name, test.file) for test in all_tests()}, name
        assert all(name in MUTANTS[each].bugs.split() for each in broken), name


def test_every_broken_engine_is_told_of() -> None:
    told = {each for cells in TABLE.values() for each in re.split(r"<br>", cells[4].strip())}

    assert set(MUTANTS) <= told
    assert set(CLASSES) <= {name for mutant in MUTANTS.values() for name in mutant.bugs.split()}
