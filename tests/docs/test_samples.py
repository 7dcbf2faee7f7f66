"""What docs/command-line.md shows of a session is what comes out, but for figures and what happens
to be installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from source_tree import PLUGINS, ROOT, read_groups, read_project

README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "command-line.md").read_text()
COMMAND = "import sys; from headstock.cli.main import main; sys.exit(main(sys.argv[1:]))"


def samples() -> list[tuple[str, str]]:
    """Each command of a session (an indented line that begins with `$`) and the lines below it."""
    blocks = re.findall(r"^    \$ headstock (.+)\n((?:    (?! *\$).+\n)*)", PAGE, re.MULTILINE)
    return [(command, re.sub("^    ", "", shown, flags=re.MULTILINE)) for command, shown in blocks]


def shape(text: str) -> list[str]:
    """The lines without numbers, units, bars, names of operations and lists of distributions."""
    text = re.sub(r"\[[#=+.]+\]", "[bar]", text)
    text = re.sub(r"[0-9][0-9,.]*( [KMG]iB| B\b)?", "0", text)
    text = re.sub(r"\b0 thread\b", "0 threads", text)
    text = re.sub(r"\bops \w+", "ops NAME", text)
    text = re.sub(r"(; not installed: [^;]+)+", "", text)
    text = re.sub(r"(\w+ \(headstock-[\w-]+ 0\)(, )?)+", "PLUGINS", text)
    return [" ".join(line.split()) for line in text.strip("\n").split("\n")]


def run(code: str, *arguments: str) -> str:
    """What Python prints on both streams, in the order in which it comes."""
    settings = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HEADSTOCK_", "LOG_LEVEL"))
    }
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=settings,
        timeout=600,
    )
    return done.stdout


def words(command: str) -> list[str]:
    """The arguments of a command line in which only double quotes quote."""
    return [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', command)]


@pytest.mark.parametrize(("command", "shown"), samples(), ids=[command for command, _ in samples()])
def test_a_session_has_the_shape_that_is_shown(command: str, shown: str) -> None:
    assert shape(run(COMMAND, *words(command))) == shape(shown)


def test_there_are_sessions_of_success_and_of_failure() -> None:
    assert [command.split()[0] for command, _ in samples()] == ["run", "plugins", "run"]


def test_the_attention_backends_of_a_session_are_those_of_the_install_line() -> None:
    (shown,) = [shown for command, shown in samples() if "sdap" in command]
    found = []
    for member in PLUGINS:
        project = read_project(member)
        names = read_groups(member).get("headstock.attention", {})
        found += [f"{name} ({project['name']} {project['version']})" for name in names]
    assert re.search("; installed: (.*); did you mean", shown)[1] == ", ".join(sorted(found))


def test_the_python_sample_prints_the_lines_that_are_shown() -> None:
    code, shown = re.findall(r"```python\n((?s:.+?))```\n\n((?:    .+\n)+)", README)[0]
    assert run(code).splitlines() == [line.removeprefix("    ") for line in shown.splitlines()]
