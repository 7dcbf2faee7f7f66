"""docs/migrating.md says what lines of vLLM's scripts do here, and they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from migration_table import PAGE, make_page

from headstock import LLM, NotSupported


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_pages=64) as llm:
        yield llm


@pytest.mark.feature("W8")
def test_the_page_is_what_the_lines_do(llm: LLM) -> None:
    assert PAGE.read_text(encoding="utf-8") == make_page(llm), (
        "run: python tests/migration_table.py"
    )


def test_a_method_that_is_missing_is_missing_to_those_who_ask_first(llm: LLM) -> None:
    assert not hasattr(llm, "sleep") and getattr(llm, "beam_search", None) is None
    with pytest.raises(NotSupported, match=r"LLM.sleep is not supported; close the LLM"):
        llm.sleep()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'slep'"):
        _ = llm.slep  # type: ignore[attr-defined]
