"""Toy engines whose answers may follow a grammar."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_engine
from core.faults.conftest import crash_reports
from toy_engine import Toys, installed

__all__ = ["crash_reports", "toys"]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    """The toy plugins, installed, for a model with a tokenizer.json, which the rules never read."""
    folder: Path = tmp_path_factory.mktemp("toys")
    with installed(folder) as found, pytest.MonkeyPatch.context() as patch:
        # For processes that try grammars.
        patch.syspath_prepend(str(folder))
        support = str(Path(toy_engine.__file__).parent)
        paths = filter(None, [str(folder), support, os.environ.get("PYTHONPATH", "")])
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        (folder / "toy-None-False" / "tokenizer.json").write_text("{}", encoding="utf-8")
        yield found
