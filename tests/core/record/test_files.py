"""No file is lost to another one that a command writes, nor to a start that fails."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from headstock import LLM
from headstock.cli.main import main
from headstock.errors import UsageError
from headstock.record.file import read_recording

KEPT = "max_tokens = 3\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, entered, with a file of settings and two links to it."""
    (tmp_path / "it").write_text(KEPT)
    (tmp_path / "hard").hardlink_to(tmp_path / "it")
    (tmp_path / "soft").symlink_to("it")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "run --input it --record hard",
        "run --input soft --record hard",
        "run --prompt x --config it --record it",
        "bench --config it --output hard",
        "bench --record new --output ./new",
        "replay-view it --timeline hard",
        "replay-view soft --html it",
    ],
)
def test_files_that_are_one_are_refused_and_kept(
    command: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == 2
    assert "which would be written over; name another file" in capsys.readouterr().err
    assert (here / "it").read_text() == KEPT and not (here / "new").exists()


def test_what_keeps_nothing_may_be_named_twice(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay-view", "it", "--timeline", os.devnull, "--html", os.devnull]) == 6
    assert "is not a recording" in capsys.readouterr().err


def test_a_start_that_fails_leaves_an_older_recording(here: Path) -> None:
    with pytest.raises(UsageError, match="nosuch"):
        LLM("demo", attn="nosuch", record="it", record_overwrite=True)
    assert (here / "it").read_text() == KEPT


@pytest.mark.parametrize("before", [None, ""])
def test_a_start_that_fails_leaves_no_empty_recording_that_it_made(
    before: str | None, here: Path
) -> None:
    if before is not None:
        (here / "new").write_text(before)
    with pytest.raises(UsageError, match="nosuch"):
        LLM("demo", attn="nosuch", record="new")
    assert (here / "new").exists() == (before is not None)


def test_an_older_recording_is_replaced_only_when_that_is_asked_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "run",
        "--prompt",
        "Once",
        "--max-tokens",
        "2",
        "--num-pages",
        "64",
        "--quiet",
        "--record",
        "soft",
    ]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and "(--record) soft: the file exists" in err and "--record-overwrite" in err
    assert (here / "it").read_text() == KEPT

    assert main([*words, "--record-overwrite"]) == 0
    assert len(list(read_recording(here / "it").read_steps())) > 1
    (here / "empty").touch()
    assert main([*words[:-1], "empty"]) == main([*words[:-1], os.devnull]) == 0


def test_a_recording_may_go_through_a_pipe(here: Path) -> None:
    os.mkfifo(here / "pipe")
    found: list[bytes] = []
    reader = threading.Thread(
        target=lambda: found.append((here / "pipe").read_bytes()), daemon=True
    )
    reader.start()
    with LLM("demo", num_pages=64, record="pipe") as llm:
        llm.generate("Once upon a time")
    reader.join(600)
    (here / "recorder").write_bytes(found[0])

    assert len(list(read_recording(here / "recorder").read_steps())) > 5
