"""Processes that do not close their LLM, and processes that fork while they have one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headstock.cli.main import main

from .ways_out import HEAD, WAYS, Way

SECONDS = 900
"""Ends a process that hangs; one takes a few seconds on an idle machine."""
QUICK = ("a script exits within a stream",)
"""The ways out that the default tests take."""


def run_script(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """What Python with these arguments ends with."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=name, marks=() if name in QUICK else pytest.mark.full)
        for name, way in WAYS.items()
    ],
)
def test_a_script_that_closes_no_engine_ends_with_its_own_code(way: Way, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + way.code)

    result = run_script([str(script)])

    assert (result.returncode, result.stdout) == (way.exit_code, way.output), result.stderr


@pytest.mark.full
def test_an_interactive_python_ends_well() -> None:
    result = subprocess.run(
        [sys.executable, "-i", "-c", HEAD + "llm = make()"],
        input="s = llm.stream('Once', p)\nx = next(s)\n",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.full
def test_a_recording_is_whole_though_the_engine_was_not_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "recording"
    code = f"llm = LLM('demo', num_pages=64, record={str(recording)!r}); llm.generate('Once', p)"

    result = run_script(["-c", HEAD + code])

    assert (result.returncode, result.stderr) == (0, "")
    assert main(["replay", str(recording)]) == 0
    assert "identical" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_forked_process_gets_an_error_and_the_one_that_forked_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "recording"
    program = str(Path(__file__).with_name("forked.py"))

    # Two threads, so that torch has one that a fork loses.
    result = run_script([program, str(recording)], OMP_NUM_THREADS="2")

    refused = ["UsageError True", "0"]
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        *("a stream that runs:", *refused),
        *("generate:", *refused),
        *("chat:", *refused),
        *("embed:", *refused),
        *("stream:", *refused),
        *("generate_async:", *refused),
        *("reset_prefix_cache:", *refused),
        *("with:", *refused),
        *("an engine of its own:", "CannotRun True", "0"),
        *("close:", "0"),
        *("the tokenizer:", "True", "0"),
        *("exit:", "7"),
        *("drop:", "0"),
        *("a process of multiprocessing:", *refused),
        *("a worker of a DataLoader:", "UsageError True"),
        *("the parent's stream:", "299"),
    ]
    assert "Error" not in result.stderr and "dropped" not in result.stderr
    # What the children have of the file is the parent's.
    assert main(["replay", str(recording)]) == 0
    assert "identical" in capsys.readouterr().out
