"""A small engine of the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headstock.config import EngineConfig
from headstock.engine.engine import Engine

from .demo import RNG, SEED, SMALL


@pytest.fixture(autouse=True)
def requests_anew() -> None:
    """What a test asks does not depend on who ran before it."""
    RNG.bit_generator.state = np.random.default_rng(SEED).bit_generator.state


@pytest.fixture
def engine() -> Iterator[Engine]:
    """A small engine that checks every step."""
    built = Engine(EngineConfig(**SMALL, debug_invariants=True, overlap=False))
    yield built
    built.close()
