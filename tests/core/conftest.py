"""Draws of tests."""

from __future__ import annotations

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def drawn_anew(request: pytest.FixtureRequest) -> None:
    """What a test draws from its module's RNG, where that has a SEED, does not depend on who ran
    before it.
    """
    seed = getattr(request.module, "SEED", None)
    if seed is not None:
        request.module.RNG.bit_generator.state = np.random.default_rng(seed).bit_generator.state
