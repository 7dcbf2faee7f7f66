"""The source and the machine that a result was measured with."""

from __future__ import annotations

import subprocess
from pathlib import Path

from headstock.startup.device import read_cpu_name
from headstock_bench.conditions import read_commit


def run_git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    process = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return process.stdout.strip()


def test_a_tracked_file_has_a_commit_and_changes_show(tmp_path: Path) -> None:
    file, other = tmp_path / "source.py", tmp_path / "installed.py"
    file.write_text("1")
    run_git(tmp_path, "init", "-q")
    run_git(tmp_path, "add", "source.py")
    run_git(tmp_path, "commit", "-q", "-m", "one")
    head = run_git(tmp_path, "rev-parse", "HEAD")
    assert read_commit(file) == head[:12]
    other.write_text("not part of the repository around it")
    assert read_commit(other) is None
    file.write_text("2")
    assert read_commit(file) == f"{head[:12]}-dirty"


def test_a_file_outside_any_repository_has_no_commit(tmp_path: Path) -> None:
    assert read_commit(tmp_path / "source.py") is None


def test_the_processor_has_a_name() -> None:
    assert read_cpu_name()
