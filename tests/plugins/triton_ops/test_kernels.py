"""The kernels of `triton` without a GPU: what they compute, by Triton's interpreter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from interpreted import run_interpreted

FOLDER = Path(__file__).parent / "interpreted"
PARTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "conftest")
GROUPS = {
    "sampling": {"sampling", "truncation"},
    "packed": {"delta", "expert_words", "packed", "words"},
}
"""Parts that run in one process; the others run in a third one, which takes about as long."""
LATER = {"families"}
"""The parts whose tests are all `full`."""


@pytest.mark.feature("V4")
@pytest.mark.long
@pytest.mark.parametrize("group", [*GROUPS, "layers"])
def test_interpreted(group: str) -> None:
    others = set(PARTS) - LATER.union(*GROUPS.values())
    parts = GROUPS.get(group, others)
    run_interpreted(FOLDER / f"{part}.py" for part in sorted(parts))


@pytest.mark.full
@pytest.mark.parametrize(
    "part",
    [part for part in PARTS if re.search("often|full", (FOLDER / f"{part}.py").read_text())],
)
def test_more_cases_interpreted(part: str) -> None:
    run_interpreted([FOLDER / f"{part}.py"], "full")
