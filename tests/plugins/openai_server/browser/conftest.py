"""One browser and one server with the demo model for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from page_browser import open_browser
from playwright.sync_api import Browser
from served import Served, serve


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve("--num-pages", "256") as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened
