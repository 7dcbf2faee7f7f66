"""A minute of random work, and seconds of it always."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from toy_engine import Toys

from .soak import soak


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Injected faults are logged with their tracebacks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.full)])
def test_any_mix_of_requests_aborts_and_faults_leaves_nothing_behind(toys: Toys, seconds: int) -> None:
    tally = soak(seconds, toys, seed=seconds)

    assert tally.requests > 20 and tally.aborted + tally.failed + tally.refused > 0
