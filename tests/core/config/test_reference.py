"""The page of settings is the settings."""

from __future__ import annotations

import re
from pathlib import Path

from headstock.config.catalog import engine_settings, sampling_settings
from headstock.config.reference import render_page

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def drop_meanings(page: str) -> list[str]:
    """The lines of the page, rows of settings without their last cell, which is prose."""
    return [re.sub(r"^((\|[^|]*){4})\|[^|]*\|$", r"\1", line) for line in page.splitlines()]


def test_the_page_has_the_names_values_and_defaults_of_the_settings() -> None:
    assert drop_meanings(PAGE.read_text(encoding="utf-8")) == drop_meanings(render_page()), (
        "run: headstock config reference > docs/configuration.md"
    )


def test_the_page_has_every_flag_alias_and_default() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for setting in (*engine_settings().values(), *sampling_settings().values()):
        line = next(line for line in text.splitlines() if line.startswith(f"| `{setting.flag}`"))
        assert all(f"`{alias}`" in line for alias in setting.aliases)
        assert f"| {setting.default_text} |" in line
