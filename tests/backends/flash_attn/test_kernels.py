"""The plugin's own kernels without a GPU: what they compute, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreted import run_interpreted
from often import often

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.long
@pytest.mark.parametrize("which", often(1, ["not full", "full"]))
def test_interpreted(which: str) -> None:
    run_interpreted(FOLDER.glob("*.py"), which)
