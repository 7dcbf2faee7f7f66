"""Which cases every run of the tests takes, and which only `nox -s full`."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings


def often(count: int, cases: Iterable[object]) -> list[object]:
    """The cases for `pytest.mark.parametrize`; all but the first `count` of them are marked
    `full`.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*each, marks=[pytest.mark.full] if at >= count else [])
        for at, each in enumerate(values)
    ]


def count_examples(count: int) -> int:
    """So many examples of a property, fewer in the default tests and more in the full ones."""
    return count * settings().max_examples // 150
