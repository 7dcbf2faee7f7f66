"""One server with the demo model and small limits, for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served, serve

LIMITS = {
    "--max-body-bytes": 4000,
    "--max-header-bytes": 2000,
    "--max-headers": 12,
    "--max-prompts": 3,
    "--max-messages": 3,
    "--max-n": 3,
    "--max-running-requests": 4,
    "--max-queued-requests": 8,
    "--max-queued-tokens": 300,
    "--header-timeout": 0.5,
    "--body-timeout": 0.5,
    "--keep-alive": 1,
}


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    limits = [str(each) for pair in LIMITS.items() for each in pair]
    with serve(
        *("--num-pages", "128", "--served-model-name", "demo"),
        *("--served-model-name", "org/demo", *limits),
        key="secret",
    ) as served:
        yield served
