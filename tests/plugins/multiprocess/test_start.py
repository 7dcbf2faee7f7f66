"""The parts of a start that ranks do at the same time, and starts that fail meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import patience
import pytest
import rank_imports
from often import often

from headstock import LLM
from headstock.config import EngineConfig
from headstock.errors import EngineDied, ModelError
from headstock.requests import start_engine

SETTINGS: dict[str, Any] = {"device": "cpu", "num_pages": 64, "max_seq_len": 256}
FLAGS = ("--device", "cpu", "--model", "demo", "--prompt", "Once", "--tp", "2")
BEFORE_TORCH = """
import importlib.abc, os, sys, rank_imports

class Torch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(*rank_imports.find_children(), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch())
"""
"""Ends a process that is about to import torch, and says which ranks it has started by then."""
STARTS = {
    "LLM": f"from headstock import LLM; LLM('demo', tp=2, **{SETTINGS})",
    "run": f"from headstock.cli.main import main; main(['run', *{FLAGS}])",
    "serve": (
        "import socket; from attrs import asdict; from headstock.config import EngineConfig\n"
        "from headstock_openai_server.engine.messages import Start, encode_frame\n"
        "from headstock_openai_server.engine.process_main import main\n"
        "ours, theirs = socket.socketpair()\n"
        f"config = asdict(EngineConfig(model='demo', tp=2, **{SETTINGS}), recurse=False)\n"
        "ours.sendall(encode_frame(Start(config, 'WARNING', 'WARNING')))\n"
        "main([str(theirs.detach())])"
    ),
}


def has_ended(process_id: int) -> bool:
    """Whether a process has ended, which it is given time for."""
    deadline = time.monotonic() + patience.seconds
    while (path := Path(f"/proc/{process_id}")).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not path.exists()


@pytest.mark.feature("S19")
@pytest.mark.parametrize("name", often(1, ["serve", "run", "LLM"]))
def test_another_rank_starts_before_rank_0_imports_torch_and_ends_with_it(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH + STARTS[name]],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience.seconds,
    )

    (process_id,) = done.stdout.split()
    assert has_ended(int(process_id))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has other ranks do something before they import torch."""

    def close(action: str) -> None:
        rank_imports.write_gate(tmp_path, action)
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return close


@pytest.mark.feature("S19")
def test_rank_0_loads_weights_while_another_rank_imports(
    gate: Callable[[str], None], tmp_path: Path
) -> None:
    opened = tmp_path / "opened"
    gate(f"while not os.path.exists({str(opened)!r}): time.sleep(0.01)")

    def open_gate(stage: str, completed: int, total: int) -> None:
        if stage == "weights":
            opened.touch()

    # The other rank would never come if rank 0 waited for it before.
    config = EngineConfig(model="demo", tp=2, **SETTINGS)
    with LLM(config=config, start=lambda each: start_engine(each, open_gate)) as llm:
        assert opened.exists()
        starts = llm._session.engine.summary.other_starts

    # The summary has the parts of its start, its imports first.
    assert [name for name, _ in starts[0]] == [
        *("imports", "waiting", "plugins", "weights", "ranks", "memory", "graphs")
    ]


def test_a_rank_that_ends_in_its_imports_is_named(gate: Callable[[str], None]) -> None:
    gate("os._exit(3)")

    with pytest.raises(EngineDied, match=r"^rank 1 \(process \d+\) ended with exit code 3$"):
        LLM("demo", tp=2, **SETTINGS)
    assert rank_imports.find_children() == {}


def test_a_start_that_is_refused_does_not_wait_for_imports(gate: Callable[[str], None]) -> None:
    gate("time.sleep(3600)")

    with pytest.raises(ModelError):
        LLM("/no such", tp=2, **SETTINGS)
    assert rank_imports.find_children() == {}
