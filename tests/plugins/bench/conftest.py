"""What holds for tests that run benchmarks in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from unseen import leave_out_of_collections


@pytest.fixture(autouse=True, scope="module")
def unseen_by_collections() -> Iterator[None]:
    """What a benchmark let collections look at again, they leave out once more."""
    yield
    leave_out_of_collections()
