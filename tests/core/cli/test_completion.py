"""The scripts of `headstock completion`, and bash completing with its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pexpect
import pytest

from headstock import registry
from headstock.cli.completion import SHELLS, main
from headstock.cli.main import VERBS
from headstock.config.catalog import engine_settings, sampling_settings
from headstock.config.source_settings import CONFIG, PRESET
from headstock.errors import PluginBroken, UsageError
from headstock.spi import CommandSpec, SpiRange

READY = "ready-for-more> "


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_has_every_verb_and_flag_and_the_names_of_plugins(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([shell]) == 0
    script = capsys.readouterr().out
    settings = (CONFIG, PRESET, *engine_settings().values(), *sampling_settings().values())
    flags = [setting.flag for setting in settings if setting.listed != "never"]
    words = set(re.findall(r"[\w-]+", script))
    for line in (
        *VERBS,
        "bench",
        "--compare",
        *flags,
        "--partial",
        "--input",
        "inspect",
        "radix",
        "prefill-first",
        "low-latency",
    ):
        assert line in words or line.lstrip("-") in words, line


def test_a_broken_command_leaves_the_others_their_completion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = CommandSpec(
        name="hum",
        spi=SpiRange(0, 3),
        summary="hum a tune",
        implementation="hum:main",
        parser="hum:no_such_module",
    )
    specs = [(SimpleNamespace(name="hum", distribution="hum-verb", status="ok"), spec)]
    specs += [
        (SimpleNamespace(name="sob", distribution="hum-verb", status="ok"), PluginBroken("x"))
    ]
    monkeypatch.setattr(registry, "load_specs", lambda kind: specs)
    assert main(["bash"]) == 0
    script = capsys.readouterr().out
    verbs = re.search(r"^_shtab_headstock_subparsers=\((.*)\)", script, re.MULTILINE)
    assert verbs is not None and {"hum", "sob"} <= set(re.findall(r"\w+", verbs[1]))
    assert "--max-tokens" in script


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_a_usage_error(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        main(arguments)


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pexpect.spawn]:
    """An interactive bash that has read the script."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "prompts.jsonl").write_text("")
    with (folder / "script").open("w") as script, contextlib.redirect_stdout(script):
        assert main(["bash"]) == 0
    shell = pexpect.spawn(
        "bash", ["--norc", "--noprofile", "-i"], encoding="utf-8", cwd=str(folder), timeout=600
    )
    shell.sendline(f"bind 'set enable-bracketed-paste off'; PS1='{READY[:5]}''{READY[5:]}'")
    shell.expect(READY)
    shell.sendline("source ./script")
    shell.expect(READY)
    yield shell
    shell.close()


def completed(shell: pexpect.spawn, line: str) -> str:
    """The line that bash makes of `line` and the Tab key."""
    shell.send(f"{line}\t")
    shell.send("\x01echo '\x05'\r")  # Ctrl-A, Ctrl-E: the line becomes the text of an echo
    shell.expect(rf"\n'?(headstock .*?)\r\n.*{READY}")
    return str(shell.match[1])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("headstock doc", "headstock doctor "),
        ("headstock run --max-tok", "headstock run --max-tokens "),
        ("headstock run --scheduler pref", "headstock run --scheduler prefill-first "),
        ("headstock run --overlap of", "headstock run --overlap off "),
        ("headstock config sho", "headstock config show "),
        ("headstock run --preset low", "headstock run --preset low-latency "),
        ("headstock bench --comp", "headstock bench --compare "),
        ("headstock bench --scheduler pref", "headstock bench --scheduler prefill-first "),
        ("headstock bench --output promp", "headstock bench --output prompts.jsonl "),
        ("headstock run --input promp", "headstock run --input prompts.jsonl "),
    ],
)
def test_bash_completes(bash: pexpect.spawn, line: str, expected: str) -> None:
    assert completed(bash, line) == expected
