"""The kernels of `triton` without a GPU: what they compute, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
PARTS = [FOLDER / f"{part}.py" for part in ("attention", "kit", "engine")]


@pytest.mark.long
def test_interpreted() -> None:
    run_interpreted(PARTS)


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.stem)
def test_more_cases_interpreted(part: Path) -> None:
    run_interpreted([part], "full")
