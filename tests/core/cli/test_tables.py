"""Tables: within a terminal's width, and one record a line elsewhere."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from often import often
from terminal import CONTROL, shown

from headstock.cli.tables import fold_line, print_table, terminal_width

HEADER = ("NAME", "TARGET", "WHAT")
ROWS = [("a", "module:spec", "short"), ("longer", "x", "a sentence of words " * 8), ("[b]", "y", 7)]


def piped(*arguments: str) -> list[str]:
    """The lines of a command that nobody reads on a terminal."""
    command = [sys.executable, "-m", "headstock", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert "\x1b" not in process.stdout
    return process.stdout.splitlines()


def test_without_a_terminal_a_record_is_one_line_in_columns() -> None:
    stream = io.StringIO()
    print_table(HEADER, ROWS, stream, spare=("TARGET",))
    assert stream.getvalue().splitlines() == [
        "NAME    TARGET       WHAT",
        "a       module:spec  short",
        "longer  x            " + ("a sentence of words " * 8).rstrip(),
        "[b]     y            7",
    ]


class Terminal(io.StringIO):
    """A terminal whose width the environment says."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("columns", "has_target"), [(40, False), (300, True)])
def test_a_narrow_terminal_breaks_cells_between_words_and_leaves_the_spare_column_out(
    monkeypatch: pytest.MonkeyPatch, columns: int, has_target: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    print_table(HEADER, ROWS, stream, spare=("TARGET",))
    text = CONTROL.sub("", stream.getvalue())
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert ("TARGET" in lines[0], "module:spec" in text) == (has_target, has_target)
    assert any(line.startswith("[b]") for line in lines)
    assert text.split().count("sentence") == 8


def test_further_spare_columns_go_while_names_would_be_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [("a-name-of-twenty-six-char", "1.0", "module:spec", "ok")]
    header = ("NAME", "VERSION", "TARGET", "STATUS")
    left = {}
    for columns in (80, 50, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = Terminal()
        print_table(header, rows, stream, spare=("TARGET", "VERSION"))
        lines = CONTROL.sub("", stream.getvalue()).splitlines()
        assert lines[1].startswith("a-name-of-twenty-six-char ")
        left[columns] = lines[0].split()
    assert left == {
        80: ["NAME", "VERSION", "TARGET", "STATUS"],
        50: ["NAME", "VERSION", "STATUS"],
        40: ["NAME", "STATUS"],
    }


def test_a_line_is_folded_between_words_with_its_continuation_indented() -> None:
    line = "plugins   attention sdpa | cache radix --no-overlap"
    assert fold_line(line, None, 10) == fold_line(line, 80, 10) == line
    assert (
        fold_line(line, 38, 10) == "plugins   attention sdpa | cache radix\n          --no-overlap"
    )
    assert (
        fold_line("see a-path-that-is-longer/than-the-line", 20, 2)
        == "see\n  a-path-that-is-longer/than-the-line"
    )


def test_commands_are_never_broken_so_that_they_can_be_copied() -> None:
    command = (
        'pip install gguf accelerate && python -c "import sys; print(sys.argv)" DIR x.gguf '
        "./x-safetensors"
    )
    message = "it is in the GGUF format; use the model it was made from, or convert it: "
    assert fold_line(message + command, 40, 2).splitlines() == [
        "it is in the GGUF format; use the model",
        "  it was made from, or convert it:",
        command,
    ]
    quoted = (
        "download it with 'hf download owner/name --local-dir DIR' and pass that as --model; "
        "it's the model's own"
    )
    assert fold_line(quoted, 45, 0).splitlines() == [
        "download it with",
        "'hf download owner/name --local-dir DIR' and",
        "pass that as --model; it's the model's own",
    ]


def test_the_width_is_the_terminals_or_what_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_width(io.StringIO()) is None and terminal_width(Terminal()) is None
    monkeypatch.setenv("COLUMNS", "57")
    assert terminal_width(io.StringIO()) is None and terminal_width(Terminal()) == 57
    monkeypatch.setenv("COLUMNS", "3")
    assert terminal_width(Terminal()) is None


@pytest.mark.parametrize(
    "command",
    often(
        2,
        [
            "plugins list",
            "config show",
            "run --help",
            "doctor",
            "plugins inspect radix",
            "config presets",
            "--help",
        ],
    ),
)
def test_a_terminal_of_80_columns_shows_no_longer_line_and_a_pipe_the_same_records(
    command: str,
) -> None:
    code, lines = shown(*command.split())
    assert code == 0
    assert [line for line in lines if len(line) > 80] == []
    starts = [
        line.split()[:2] for line in piped(*command.split()) if line and not line.startswith(" ")
    ]
    seen = [line.split()[:2] for line in lines]
    assert [start for start in starts if start not in seen] == []


@pytest.mark.full
def test_a_run_on_a_terminal_says_what_it_is_made_of_within_80_columns() -> None:
    code, lines = shown("run", "-v", "-p", "12 + 30 =", "--num-pages", "256", "--temperature", "0")
    assert code == 0 and "12 + 30 = 42." in lines
    assert [line for line in lines if len(line) > 80] == []
    (number,) = (
        number
        for number, line in enumerate(lines)
        if line.startswith("plugins   attention sdpa | ")
    )
    assert lines[number + 1].startswith(" " * 10) and "ops " in lines[number] + lines[number + 1]


def test_one_line_in_a_pipe_is_one_preset_setting() -> None:
    assert "debug               overlap               off" in piped("config", "presets")


def test_an_error_on_a_terminal_breaks_between_words() -> None:
    code, lines = shown("run", "m", "Hello", "more")
    assert code == 2 and [line for line in lines if len(line) > 80] == []
    assert " ".join(lines).startswith(
        "headstock: unexpected argument more (the first word is the model, the second a prompt"
    )
