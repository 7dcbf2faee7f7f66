"""A recording that cannot be read says so in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from core.record.runs import make_recorder, make_requests, make_run_limits, record_run, run_steps
from often import often

from headstock.cli.main import main
from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import ModelError
from headstock.record.file import HEADER, write_frame
from headstock.record.recorder import MAX_BLOCK_STEPS, MAX_CRASH_RECORDINGS, MAX_KEPT


@pytest.fixture(scope="module")
def file_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A recording of 600 steps."""
    path = tmp_path_factory.mktemp("whole") / "whole.recording"
    record_run(path, make_run_limits(), make_requests(300), 600)
    return path.read_bytes()


def replay_bytes(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, str]:
    """The exit code of replaying the bytes, and the one line that it prints on standard error."""
    path = tmp_path / "it"
    path.write_bytes(data)
    code = main(["replay", str(path), *flags])
    error = capsys.readouterr().err
    assert error.count("\n") == (code != 0)
    return code, error


@pytest.mark.parametrize("share", often(6, [0.0, 0.0005, 0.003, 0.01, 0.2, 0.9995, 0.5, 0.7, 0.9]))
def test_a_flipped_byte_is_found(
    file_bytes: bytes, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = int(len(file_bytes) * share)
    code, line = replay_bytes(
        file_bytes[:at] + bytes([file_bytes[at] ^ 0x10]) + file_bytes[at + 1 :], tmp_path, capsys
    )
    assert code == 6
    assert any(words in line for words in ("is damaged", "breaks off", "is not a recording"))


def test_every_flipped_byte_of_the_beginning_is_found(
    file_bytes: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for at in range(60):
        code, _ = replay_bytes(
            file_bytes[:at] + bytes([file_bytes[at] ^ 1]) + file_bytes[at + 1 :], tmp_path, capsys
        )
        assert code == 6, at


@pytest.mark.parametrize("share", often(2, [0.3, 0.6, 0.999]))
def test_a_truncated_file_says_where_and_partial_replays_what_is_there(
    file_bytes: bytes, share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = file_bytes[: int(len(file_bytes) * share)]
    code, line = replay_bytes(cut, tmp_path, capsys)
    assert code == 6 and "breaks off in the part at byte" in line and "--partial" in line
    path = tmp_path / "it"
    assert main(["replay", str(path), "--partial"]) == 0
    assert "the recording breaks off there" in capsys.readouterr().out


@pytest.mark.parametrize("flags", often(1, [["--partial"], []]))
def test_bytes_after_the_end_mark_are_found(
    file_bytes: bytes, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (b"\n", file_bytes):
        code, line = replay_bytes(file_bytes + more, tmp_path, capsys, *flags)
        assert (
            code == 6
            and f"goes on for {len(more)} bytes after its end mark, at byte {len(file_bytes)}"
            in line
        )


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a recording"),
        (b"{}", "is not a recording"),
        (
            b"headstock recording 1\n",
            "version 1 and this headstock reads versions 3 to 4; replay it",
        ),
        (b"headstock recording 99\n", "is a recording of version 99 and this headstock reads"),
        (b"headstock recording 3\n", "breaks off in the part at byte 22"),
    ],
)
def test_what_is_no_recording_of_this_version(
    data: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = replay_bytes(data, tmp_path, capsys)
    assert code == 6 and words in line


def test_steps_of_another_shape_are_of_another_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old"
    with path.open("wb") as file:
        file.write(b"headstock recording 3\n")
        write_frame(
            file, HEADER, json.dumps({"headstock": "0.0.1", "fields": {"Plan": ["rows"]}}).encode()
        )
    code, line = replay_bytes(path.read_bytes(), tmp_path, capsys)
    assert code == 6 and "was made by headstock 0.0.1, whose steps consist of other fields" in line


def test_a_missing_file_and_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / "none")]) == 6
    assert "No such file" in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"record \(--record\) .* cannot be written: No such file"):
        Engine(EngineConfig(record=str(tmp_path / "no" / "file")))


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = make_run_limits()
    recorder = make_recorder(limits, tmp_path / "run.recording")
    assert recorder.writer is not None and recorder.writer.file is not None
    recorder.writer.file.close()
    steps = run_steps(limits, make_requests(50), 3 * MAX_BLOCK_STEPS)
    for events, state, plan in steps:
        recorder.record_step(events, state, plan)
    recorder.writer.write_pending()
    recorder.close()
    assert [record.message.split()[0] for record in caplog.records] == ['event="recording']
    assert len(recorder.writer.pending) == 0


def test_reports_go_to_the_temporary_folder_and_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    recorder = make_recorder(make_run_limits(), None)
    for events, state, plan in run_steps(make_run_limits(), make_requests(5), 10):
        recorder.record_step(events, state, plan)
    lines = [recorder.write_crash_recording() for _ in range(MAX_CRASH_RECORDINGS + 1)]
    assert all("headstock replay" in line for line in lines[:-1]) and "earlier" in lines[-1]
    assert len(list(tmp_path.glob("headstock-crash-*.recording"))) == MAX_CRASH_RECORDINGS


def test_the_newest_reports_are_kept_and_nothing_else_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    others = ["headstock-crash-notes.recording", "headstock-mine.recording", "run.recording"]
    for name in others:
        (tmp_path / name).write_bytes(b"mine" if "notes" in name else b"headstock recording 3\n")
    (tmp_path / "headstock-crash-linked.recording").symlink_to("run.recording")
    (tmp_path / "headstock-crash-folder.recording").mkdir()
    recorder = {path.name for path in tmp_path.iterdir()}
    for path in tmp_path.glob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    first = next(iter(run_steps(make_run_limits(), make_requests(5), 10)))
    made = []
    for number in range(MAX_KEPT + 3):
        one = make_recorder(make_run_limits(), None)
        one.record_step(*first)
        made.append(Path(one.write_crash_recording().rpartition(" ")[2]))
        os.utime(made[-1], (number + 1, number + 1))
    left = {path.name for path in tmp_path.iterdir()}
    # The report that was written last is the newest while it is written.
    assert left == recorder | {path.name for path in made[-MAX_KEPT:]}


def test_a_report_that_cannot_be_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert (
        make_recorder(make_run_limits(), None)
        .write_crash_recording()
        .startswith("no recording could be written: [Errno 2] No such file")
    )
