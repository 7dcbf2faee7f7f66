"""Commands show the log lines of plugins as they show headstock's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for member in ("backends", "plugins", "models")
    for path in (ROOT / member).glob("*/src/**/*.py")
]
LOGGER = re.compile(r"^\w+ = logging\.getLogger\((.*)\)$", re.MULTILINE)
LOGGING = [path for path in SOURCES if LOGGER.search(path.read_text())]


@pytest.mark.parametrize("path", LOGGING, ids=lambda path: path.parent.name)
def test_a_plugin_logs_below_headstock_whose_lines_are_shown(path: Path) -> None:
    (name,) = LOGGER.findall(path.read_text())
    assert re.fullmatch(r'"headstock\.\w+"', name)


def test_there_are_plugins_that_log() -> None:
    assert len(LOGGING) >= 3
