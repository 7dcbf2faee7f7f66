"""docs/reliability.md names every class of failure, tests that exist, and every broken engine."""

from __future__ import annotations

import pytest
from core.mutants.broken import MUTANTS
from core.mutants.broken_answers import MISTAKEN
from core.mutants.broken_drafts import DRAFTED
from core.mutants.broken_rules import NEGLECTED
from core.mutants.broken_vectors import MISPOOLED
from core.mutants.table import PAGE, ROW, TABLE, catches
from feature_table import all_tests

CLASSES = (
    *"P1 P2 P3 P4 P5 P6 P7 P8 P9 P10 P11 P12 P13".split(),
    *"C1 C2 C3 C4 C5 C6 C7 S8 S9 S10 O1 O2 O3 O4 O5".split(),
)


def test_every_class_has_tests_each_with_a_broken_engine_that_it_notices() -> None:
    assert [bug for bug, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))] == [*CLASSES]
    assert {catch.bug for catch in TABLE} == set(CLASSES)
    assert {(catch.file, catch.test) for catch in TABLE} <= {
        (test.file, test.name) for test in all_tests()
    }


def test_every_broken_engine_is_in_the_table_and_nothing_else() -> None:
    assert {catch.mutant for catch in TABLE} == {
        *MUTANTS,
        *NEGLECTED,
        *MISTAKEN,
        *MISPOOLED,
        *DRAFTED,
    }


def test_a_test_that_notices_nothing_has_no_place_in_the_table() -> None:
    with pytest.raises(
        ValueError,
        match=r"C9: expected a link to a test and the broken engines it detects, got '\[test_x",
    ):
        list(catches("| C9 | it stops | [test_x](../tests/core/test_x.py) |\n"))
