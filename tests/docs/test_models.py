"""docs/models.md says which architectures are served, by what, and which backends serve them."""

from __future__ import annotations

import re

import pytest
from model_table import (
    MODELS,
    PAGE,
    TABLES,
    list_architectures,
    list_fallbacks,
    list_refused,
    read_rows,
)

UPDATE = "run: python tests/model_table.py"
NATIVE, COMPUTED, REFUSED = TABLES


def read_architectures(heading: str) -> list[str]:
    """The first column of a table."""
    rows = read_rows(PAGE.read_text(encoding="utf-8"), heading)
    return [re.findall("`(.+?)`", row)[0] for row in rows]


def test_each_architecture_is_in_the_table_of_what_becomes_of_it() -> None:
    assert read_architectures(NATIVE) == list_architectures(), UPDATE
    assert read_architectures(COMPUTED) == [*list_fallbacks().values()], UPDATE
    assert read_architectures(REFUSED) == [*list_refused().values()], UPDATE


def test_each_architecture_of_a_family_is_described() -> None:
    assert sorted(MODELS) == list_architectures()


@pytest.mark.full
@pytest.mark.parametrize("heading", TABLES)
def test_each_row_says_what_the_registry_and_the_claims_of_backends_say(heading: str) -> None:
    assert read_rows(PAGE.read_text(encoding="utf-8"), heading) == [*TABLES[heading]()], UPDATE
