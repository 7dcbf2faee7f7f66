"""The page of settings is the settings."""

from __future__ import annotations

from pathlib import Path

from headstock.config.catalog import engine_settings, sampling_settings
from headstock.config.reference import render_page

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_page(), (
        "run: headstock config reference > docs/configuration.md"
    )


def test_the_page_has_every_flag_alias_and_default() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for setting in (*engine_settings().values(), *sampling_settings().values()):
        line = next(line for line in text.splitlines() if line.startswith(f"| `{setting.flag}`"))
        assert all(f"`{alias}`" in line for alias in setting.aliases)
        assert f"| {setting.default_text} |" in line
