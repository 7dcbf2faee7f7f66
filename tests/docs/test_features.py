"""tests/features.md names every behaviour that is owed, and the tests that are there."""

from __future__ import annotations

import re

import pytest
from feature_table import NONE, PAGE, Row, all_tests, rewritten, rows

IDS = """
T1 T3 T4 T6 T7 T8 T9 T10 T12 T13 T14 T15 T16 T17 T18 T19 T20 T22
P1 P2 P3 P4 P5 P6 P7 P8 P10 P11 P12 P13
G1 G2 G3 G4 G5 G6 G7 G8 G9 G10 G11 G12 G13 G14
S1 S3 S4 S5 S6 S7 S8 S9 S10 S11 S12 S13 S14 S15 S16 S17 S18 S19 S20 S22 S23 S24 S25 S26
H1 H2 H3 H4 H5 H6 H7 H8 H10 H11 H12 H13 H14 H15 H16 H17
I1 I2 I3 I4 I5 I6 I7 I8 I9 I10 I11 I12 I13 I14 I15 I16 I17 I18 I19 I20 I21 I22 I23 I24
R1 R2 R3 R4 R5 R6 R7 R8 R9 R10 R11 R12
W1 W2 W3 W4 W5 W6 W7 W8 W9 W10 W11 W12 W13 W14 W15 W16 W17 W18 W19 W20
V1 V2 V3 V4 V5 V6 V7 V8 V9 V10 V11 V12
""".split()
"""What is owed. It changes only on purpose."""

TABLE = rows(PAGE.read_text(encoding="utf-8"))
RELIABILITY = PAGE.parents[1] / "docs" / "reliability.md"
UPDATE = "run `python tests/feature_table.py`"


def test_every_id_is_in_the_table_once() -> None:
    assert sorted(id for row in TABLE for id in row.all_ids) == sorted(IDS)


def test_the_page_names_the_numbers_that_stand_for_nothing() -> None:
    numbers = {kind: [int(id[1:]) for id in IDS if id[0] == kind] for kind in "TPGSHIRWV"}
    unused = [
        f"{kind}{n}" for kind, used in numbers.items() for n in range(1, max(used)) if n not in used
    ]
    (said,) = re.findall(
        r"^Nothing has the numbers (.+)\.$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert re.findall(r"[A-Z]\d+", said) == unused


def test_every_test_named_in_the_table_exists() -> None:
    there = set(all_tests())
    assert [test.name for row in TABLE for test in row.tests if test not in there] == [], UPDATE


def test_every_test_that_carries_an_id_is_in_its_row() -> None:
    absent = [
        test.name
        for test in all_tests()
        for row in TABLE
        if test.ids & row.all_ids and test not in row.tests
    ]
    assert absent == [], UPDATE


def test_every_id_that_a_test_carries_is_owed() -> None:
    failures = re.findall(r"^\| (C\d+) ", RELIABILITY.read_text(encoding="utf-8"), re.MULTILINE)
    carried = {id for test in all_tests() for id in test.ids}
    assert sorted(carried - {*IDS, *failures}) == []


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join(row.ids))
def test_a_row_without_tests_says_what_is_missing_and_one_with_tests_where_it_is_documented(
    row: Row,
) -> None:
    if row.tests:
        assert re.search(r"\]\(\S+\)", row.documented), "no page is linked"
    else:
        assert row.missing, "no test, and no word why"


def test_the_column_of_tests_is_rewritten_as_documented() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rewritten(page, all_tests()) == page, UPDATE
    bare = rewritten(page, [])
    assert all(not row.tests for row in rows(bare))
    assert bare.count(f"| {NONE} |") == len(TABLE)
