"""The kernels of `triton` without a GPU: what they compute, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted import run_interpreted
from often import often

PARTS = sorted((Path(__file__).parent / "interpreted").glob("*.py"))


@pytest.mark.parametrize("which", often(1, ["not full", "full"]))
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.stem)
def test_interpreted(part: Path, which: str) -> None:
    run_interpreted(part, which)
