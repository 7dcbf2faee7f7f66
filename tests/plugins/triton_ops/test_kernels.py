"""The kernels of `triton` without a GPU: what they compute, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
PARTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "conftest")
SAMPLING = {"sampling", "truncation"}
"""The parts that take as long together as the others do."""
LATER = {"families"}
"""The parts whose tests are all `full`."""


@pytest.mark.feature("V4")
@pytest.mark.long
@pytest.mark.parametrize("sampling", [False, True])
def test_interpreted(sampling: bool) -> None:
    parts = [part for part in PARTS if part not in LATER and (part in SAMPLING) is sampling]
    run_interpreted(FOLDER / f"{part}.py" for part in parts)


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_more_cases_interpreted(part: str) -> None:
    run_interpreted([FOLDER / f"{part}.py"], "full")
