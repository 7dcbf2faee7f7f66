"""One server with the demo model, whose chat template writes tools, for all clients that ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served
from tool_caller import serve_chooser


@pytest.fixture(scope="session")
def chooser() -> Iterator[Served]:
    with serve_chooser("secret") as served:
        yield served


@pytest.fixture(scope="session")
def base_url(chooser: Served) -> str:
    return f"http://127.0.0.1:{chooser.port}/v1"
