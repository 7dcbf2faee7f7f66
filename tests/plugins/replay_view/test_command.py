"""`headstock replay-view`, its flags and exit codes, and what `replay` says of drawings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from core.record.runs import make_recorder, make_requests, make_run_limits, record_run, run_steps

from headstock.cli.main import main


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A short recording."""
    path = tmp_path / "run.recording"
    record_run(path, make_run_limits(), make_requests(4), 40)
    return path


def test_a_page_and_a_trace_are_drawn_at_once(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    arguments = ["--html", str(page), "--timeline", str(trace), "--check"]
    assert main(["replay-view", str(recording), *arguments]) == 0
    assert capsys.readouterr().out.endswith("steps, identical\n")
    assert page.stat().st_size > 10_000 and trace.stat().st_size > 1_000


def test_a_trace_alone_runs_nothing_again(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a trace needs no plugin of the recording")

    monkeypatch.setattr("headstock_replay_view.command.restore_limits", refuse)
    trace = tmp_path / "trace.json"
    assert main(["replay-view", str(recording), "--timeline", str(trace)]) == 0
    assert trace.stat().st_size > 1_000


def test_a_drawing_must_be_asked_for(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay-view", str(recording)]) == 2
    assert capsys.readouterr() == (
        "",
        "headstock: expected --html OUT.html, --timeline OUT.json or both, got neither\n",
    )


@pytest.mark.parametrize(
    "flags", [["--html", "it"], ["--timeline", "it"], ["--html", "new", "--timeline", "./new"]]
)
def test_a_drawing_is_written_over_neither_the_recording_nor_the_other_one(
    flags: list[str],
    recording: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(recording.parent)
    Path("it").hardlink_to(recording)
    before = recording.read_bytes()
    assert main(["replay-view", "run.recording", *flags]) == 2
    assert "which would be written over; name another file" in capsys.readouterr().err
    assert recording.read_bytes() == before and not Path("new").exists()


def test_drawing_imports_no_torch(recording: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from headstock.cli.main import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    drawings = ["--html", str(tmp_path / "a.html"), "--timeline", str(tmp_path / "a.json")]
    command = [sys.executable, "-c", script, "replay-view", str(recording), *drawings]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.endswith("identical\nFalse\n")


@pytest.mark.parametrize("flag", ["--html", "--timeline"])
def test_a_drawing_that_cannot_be_written_is_one_line(
    flag: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay-view", str(recording), flag, "/nowhere/at/all"]) == 6
    assert f"{flag} /nowhere/at/all: cannot be written: " in capsys.readouterr().err


def test_the_page_of_a_tail_is_refused_and_its_trace_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tail = make_recorder(make_run_limits(), None)
    for events, state, plan in run_steps(make_run_limits(), make_requests(100), 300):
        tail.record_step(events, state, plan)
    tail.write_crash_recording()
    (path,) = tmp_path.glob("*.recording")
    assert main(["replay-view", str(path), "--html", str(tmp_path / "page.html")]) == 5
    assert "a page shows a replay from step 0; --timeline OUT.json" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--html", "--timeline", "--html=out", "--timeline=out"])
def test_replay_names_the_command_that_draws(
    flag: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), flag, "out"]) == 2
    name = flag.partition("=")[0]
    assert f"'headstock replay-view FILE {name} OUT' draws" in capsys.readouterr().err


def test_where_it_is_not_installed_the_pip_line_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headstock.registry.entries.read_distributions", lambda: ())
    assert main(["replay-view", "run.recording"]) == 2
    assert (
        "'replay-view' is not installed; install it with: pip install ./plugins/replay-view"
        in capsys.readouterr().err
    )
