"""The searches find something in every broken engine, and nothing in the engine as it is."""

from __future__ import annotations

import logging

import pytest
from toy_engine import Toys

from headstock.errors import EngineDied, PluginBroken

from . import broken
from .broken_rules import NEGLECTED
from .hunts import HUNTS, Hunt
from .hunts_rules import HUNTS_OF_RULES

MUTANTS = broken.MUTANTS | NEGLECTED


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Broken engines log their failures."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_engine_is_caught(name: str, toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, PluginBroken, EngineDied), match=mutant.said):
        mutant.hunt(toys)


@pytest.mark.parametrize("hunt", [*HUNTS, *HUNTS_OF_RULES], ids=lambda hunt: hunt.__name__)
def test_nothing_is_found_in_the_engine_as_it_is(hunt: Hunt, toys: Toys) -> None:
    hunt(toys)
