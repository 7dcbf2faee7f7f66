"""Broken schedulers chosen on the command line: one line on standard error and the exit code of
what is the matter.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from broken_plugins import MISMATCHED

from headstock.cli.main import main

CHOSEN = [
    ("soumd", 2, "did you mean sound?"),
    ("twin", 2, "choose with twin-first:twin or twin-second:twin"),
    ("import-error", 3, "raises-import-error 1.0"),
    ("assertion", 3, "raises-assertion 1.0"),
    ("system-exit", 3, "raises-system-exit 1.0"),
    ("wrong-type", 3, "wrong-type 1.0"),
    ("late", 3, "breaks-late 1.0"),
    ("future", 4, "from-the-future 1.0"),
    ("next", 4, "next-edition 1.0"),
    ("later", 4, "next-revision 1.0"),
    ("past", 4, "from-the-past 1.0"),
    ("ancient", 4, "lost-a-name 1.0"),
    ("antique", 4, "lost-a-field 1.0"),
    ("needy", 5, "install with: pip install kernels"),
]


@pytest.mark.parametrize(("name", "code", "words"), CHOSEN, ids=[name for name, _, _ in CHOSEN])
def test_run_with_a_broken_plugin_ends_with_one_line_and_its_code(
    broken: Path, capsys: pytest.CaptureFixture[str], name: str, code: int, words: str
) -> None:
    assert main(["run", "--scheduler", name, "--prompt", "Hello", "--quiet"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("name", ["past", "later"])
def test_doctor_ends_as_run_does_for_a_plugin_of_another_contract(
    broken: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["doctor", "--scheduler", name]) == 4
    lines = [line for line in capsys.readouterr().out.splitlines() if f"scheduler {name}" in line]
    assert any("FAIL" in line and "docs/plugins.md#versions-of" in line for line in lines)


def test_the_list_names_plugins_of_another_contract_and_runs_none_of_them(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "list", "scheduler", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    refused = {name for name, row in rows.items() if row["status"] == "wrong contract"}
    assert refused == set(MISMATCHED)
    for name in MISMATCHED:
        assert main(["run", "--scheduler", name, "--prompt", "Hello", "--quiet"]) == 4
        assert capsys.readouterr().err == f"headstock: {rows[name]['hint']}\n"


def test_run_works_beside_broken_plugins(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "run",
        "--prompt",
        "Once upon a time",
        "--max-tokens",
        "4",
        "--num-pages",
        "8",
        "--quiet",
    ]
    assert main(command) == 0
    assert capsys.readouterr().out.strip()


def test_an_option_for_a_plugin_that_was_not_chosen_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--opt", "fi.x=1", "--prompt", "Hello", "--quiet"]) == 2
    assert "fi.x=1" in capsys.readouterr().err


@pytest.mark.feature("S11")
def test_an_unknown_backend_is_told_the_installed_ones_and_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--attn", "spda", "--prompt", "Hello", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "did you mean sdpa?" in error
    assert "installed: " in error and "sdpa (headstock-sdpa" in error


@pytest.mark.feature("S15")
def test_a_backend_without_its_kernels_says_what_to_install_and_the_others_work(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "inspect", "kernelless"]) == 0
    assert "no-such-kernels is not installed  pip install kernels" in capsys.readouterr().out
    assert main(["run", "--attn", "kernelless", "--prompt", "Hello", "--quiet"]) == 5
    assert (
        "no-such-kernels is not installed, install with: pip install kernels"
        in capsys.readouterr().err
    )
    command = [
        "run",
        "--attn",
        "sdpa",
        "--prompt",
        "Once upon a time",
        "--max-tokens",
        "4",
        "--num-pages",
        "8",
    ]
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().out.strip()
