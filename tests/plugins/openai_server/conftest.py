"""One server with the demo model and small limits, for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import LIMITS, Served, serve


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    limits = [str(each) for pair in LIMITS.items() for each in pair]
    with serve(
        *("--num-pages", "128", "--served-model-name", "demo"),
        *("--served-model-name", "org/demo", "--scoring", "cosine", *limits),
        *("--allow-origins", "https://app.example", "--root-path", "/llm"),
        key="secret",
    ) as served:
        yield served
