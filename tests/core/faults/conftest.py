"""Toy engines for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from toy_engine import Toys, installed


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """The toy plugins, installed."""
    with installed(tmp_path_factory.mktemp("toys")) as found:
        yield found
