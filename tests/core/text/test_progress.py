"""Progress bars: on a terminal only, bytes with their rate."""

from __future__ import annotations

import io

import pytest

from headstock.progress import Bars, amount


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "shown", "drawn"), [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)]
)
def test_bars_are_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, shown: bool, drawn: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    with Bars(shown=shown) as bars:
        bars.report("prompts", 1, 4)
        bars.report("prompts", 3, 4)
    assert ("3 of 4" in stderr.getvalue()) == drawn
    assert bool(stderr.getvalue()) == drawn


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    with Bars() as bars:
        bars.report("prompts", 4, 4)
        assert bars.progress is not None and bars.progress.console.no_color


def test_what_follows_a_comma_changes_in_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    with Bars() as bars:
        bars.report("graphs, 2.00 GiB free", 1, 4)
        bars.report("graphs, 1.00 GiB free", 2, 4)
        (task,) = bars.progress.tasks
    assert task.description == "graphs, 1.00 GiB free" and task.fields["amount"] == "2 of 4"


def test_bytes_have_a_rate() -> None:
    assert amount("weights", 2_000_000_000, 4_000_000_000, 2.0) == "2.00 of 4.00 GB, 1.00 GB/s"
    assert amount("weights", 12_000_000, 25_700_000, 0.1) == "12.00 of 25.70 MB, 120.00 MB/s"
    assert amount("prompts", 1, 2, 2.0) == "1 of 2"
