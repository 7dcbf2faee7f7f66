"""An environment with the broken plugins in it, in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from broken_plugins import DISTS, write_installed


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder on `sys.path` where the broken distributions are."""
    write_installed(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for dist in DISTS:
        monkeypatch.delitem(sys.modules, dist.package, raising=False)
    return tmp_path
