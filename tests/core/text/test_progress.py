"""Progress bars: on a terminal only, bytes with their rate."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from typing import Any

import pytest
from tqdm import tqdm

from headstock.errors import UsageError
from headstock.requests.progress_bars import ProgressBars, format_amount, prompt_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "shown", "drawn"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
)
def test_bars_are_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, shown: bool, drawn: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    with ProgressBars(shown=shown) as bars:
        bars.update("prompts", 1, 4)
        bars.update("prompts", 3, 4)
    assert ("3 of 4" in stderr.getvalue()) == drawn
    assert bool(stderr.getvalue()) == drawn


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with ProgressBars() as bars:
        bars.update("prompts", 4, 4)
        assert bars.progress is not None and bars.progress.console.no_color


def test_what_follows_a_comma_changes_in_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    with ProgressBars() as bars:
        bars.update("graphs, 2.00 GiB free", 1, 4)
        bars.update("graphs, 1.00 GiB free", 2, 4)
        (task,) = bars.progress.tasks
    assert task.description == "graphs, 1.00 GiB free" and task.fields["amount"] == "2 of 4"


def test_bytes_have_a_rate() -> None:
    assert (
        format_amount("weights", 2_000_000_000, 4_000_000_000, 2.0)
        == "2.00 of 4.00 GB, 1.00 GB/s, 0:02 left"
    )
    assert format_amount("weights", 12_000_000, 25_700_000, 0.1) == "12.00 of 25.70 MB, 120.00 MB/s"


def test_prompts_have_tokens_a_second_and_the_time_left() -> None:
    assert format_amount("prompts", 1, 4, 2.0, 60) == "1 of 4, 30.0 tokens/s, 0:06 left"
    assert format_amount("prompts", 4, 4, 8.0, 240) == "4 of 4, 30.0 tokens/s"
    assert format_amount("prompts", 0, 4, 0.0) == "0 of 4"
    assert (
        format_amount("weights", 1_000_000, 4_000_000, 3721.0)
        == "1.00 of 4.00 MB, 0.00 MB/s, 3:06:03 left"
    )


@pytest.mark.parametrize("use_tqdm", [True, tqdm])
def test_a_bar_of_tqdm_is_drawn_anywhere_with_tokens_a_second(
    use_tqdm: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with prompt_bar(use_tqdm, 3) as advance:
        for _ in range(3):
            advance(False, 1)
            advance(True, 4)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "Processed prompts: 100%" in last and "3/3" in last
    assert re.search(r", \d+\.\d tokens/s\]", last)


def test_no_bar_of_tqdm_and_what_makes_none(capsys: pytest.CaptureFixture[str]) -> None:
    with prompt_bar(False, 1) as advance:
        advance(True, 4)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(
        UsageError,
        match="use_tqdm: expected True, False or a callable that makes a bar, got str yes",
    ):
        prompt_bar("yes", 1).__enter__()  # type: ignore[arg-type]


def test_tqdm_is_imported_when_a_bar_is_drawn_and_not_before() -> None:
    modules = "headstock.requests.progress_bars, headstock.cli.main"
    code = f"import sys, {modules}; sys.exit('tqdm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0
