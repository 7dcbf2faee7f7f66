"""docs/migrating.md says what lines of vLLM's scripts do here, and they do."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from migration_table import PAGE, make_page

from headstock import LLM, NotSupported


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_pages=64) as llm:
        yield llm


def read_rows(page: str) -> list[tuple[str, str]]:
    """Each line of a script and its status; the column beside them is prose."""
    return re.findall(r"^\| `(.+?)` \| (\w+) \|", page, re.MULTILINE)


@pytest.mark.feature("W8")
def test_each_line_has_the_status_that_the_page_says(llm: LLM) -> None:
    rows = read_rows(PAGE.read_text(encoding="utf-8"))
    assert rows == read_rows(make_page(llm)), "run: python tests/migration_table.py"
    assert {status for _, status in rows} == {"works", "renamed", "different", "refused"}


def test_a_method_that_is_missing_is_missing_to_those_who_ask_first(llm: LLM) -> None:
    assert not hasattr(llm, "sleep") and getattr(llm, "beam_search", None) is None
    with pytest.raises(NotSupported, match=r"LLM.sleep is not supported; close the LLM"):
        llm.sleep()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'slep'"):
        _ = llm.slep  # type: ignore[attr-defined]
