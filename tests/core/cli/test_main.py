"""The command line's entry: verbs, errors, speed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from source_tree import ROOT

from headstock import registry
from headstock.cli import main as entry
from headstock.cli.main import VERBS, main
from headstock.cli.process import ALLOCATOR
from headstock.errors import (
    CapacityError,
    EngineDied,
    HeadstockError,
    ModelError,
    PluginBroken,
    SpiMismatch,
    UsageError,
)
from headstock.registry import InstalledPlugin, entries
from headstock.spi import CommandSpec, SpiRange


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module behind `headstock run`, replaced."""
    module = ModuleType("headstock.cli.run")
    monkeypatch.setitem(sys.modules, "headstock.cli.run", module)
    monkeypatch.delenv(entry.TRACEBACK, raising=False)
    return module


def failing(module: ModuleType, error: BaseException) -> None:
    """Make the verb raise `error`."""

    def fail(arguments: list[str]) -> int:
        raise error

    module.main = fail  # type: ignore[attr-defined]


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    verbs = {**VERBS, **entry.list_plugin_commands()}
    assert "bench" in verbs
    assert all(f"  {verb}" in text and summary in text for verb, summary in verbs.items())
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(f"headstock {verb} MODEL" in shown for verb in ("chat", "run", "serve"))
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("headstock ")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["config", "show"]])
def test_help_version_and_config_import_neither_torch_nor_plugins(arguments: list[str]) -> None:
    script = (
        "import sys; from headstock.cli.main import main; code = main(sys.argv[1:]);"
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr); "
        "sys.exit(code)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert "'headstock'" in process.stderr
    assert "'torch'" not in process.stderr
    assert "'stevedore'" not in process.stderr
    assert "headstock_" not in process.stderr


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_answer_in_less_than_300_ms(flag: str) -> None:
    script = "import sys; from headstock.cli.main import main; sys.exit(main(sys.argv[1:]))"
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", script, flag], capture_output=True, check=True, timeout=600
        )
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3


@pytest.mark.parametrize(("call", "frozen"), [("main()", True), ("main(['--version'])", False)])
def test_only_a_process_that_ends_with_its_command_spares_the_collector_a_last_look(
    call: str, frozen: bool
) -> None:
    script = (
        f"import gc; from headstock.cli.main import main; {call}; print(gc.get_freeze_count() > 0)"
    )
    command = [sys.executable, "-c", script, "--version"]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert process.stdout.splitlines()[-1] == str(frozen)


def test_a_process_collects_no_garbage_until_its_verb_begins_or_its_engine_has_started() -> None:
    script = """
import gc, sys, types
from headstock.cli import main as entry
for verb in ("run", "config"):
    module = types.ModuleType(f"headstock.cli.{verb}")
    module.main = lambda arguments: print(gc.isenabled()) or 0
    sys.modules[module.__name__] = module
    sys.argv = ["headstock", verb]
    entry.main()
gc.disable()
entry.resume_collections()
print(gc.isenabled(), gc.get_freeze_count() > 10_000)
"""
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert process.stdout.split() == ["False", "True", "True", "True"]


def test_python_m_headstock_is_the_console_script() -> None:
    def headstock(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "headstock", *arguments]
        process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        return process.returncode, process.stdout, process.stderr

    assert headstock("--version") == (0, f"headstock {entry.read_version()}\n", "")
    code, out, err = headstock("run", "--page-sise", "4")
    assert (code, out) == (
        2,
        "",
    ) and err == "headstock: unknown flag --page-sise; did you mean --page-size?\n"


def test_a_verb_gets_the_rest_and_gives_the_exit_code(verb: ModuleType) -> None:
    seen = []
    verb.main = lambda arguments: seen.append(arguments) or 1  # type: ignore[attr-defined]
    assert main(["run", "--prompt", "a b", "-v"]) == 1
    assert main(["-v", "run"]) == 1
    assert seen == [["--prompt", "a b", "-v"], ["--verbose"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("a"), 2),
        (PluginBroken("a"), 3),
        (SpiMismatch("a"), 4),
        (ModelError("a"), 6),
        (CapacityError("a"), 1),
        (EngineDied("a"), 70),
        (HeadstockError("two\n lines"), 70),
        (ZeroDivisionError("x\ny"), 70),
        (MemoryError(), 70),
    ],
)
def test_every_error_is_one_line_and_an_exit_code(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    failing(verb, error)
    assert main(["run"]) == code
    out, message = capsys.readouterr()
    assert out == ""
    assert message.startswith("headstock: ")
    assert message.count("\n") == 1
    if not isinstance(error, HeadstockError):
        assert type(error).__name__ in message
        assert "HEADSTOCK_TRACEBACK=1" in message


def test_a_traceback_only_when_asked_for(
    verb: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(verb, KeyError("lost"))
    for value, expected in {"0": False, "": False, "1": True}.items():
        monkeypatch.setenv(entry.TRACEBACK, value)
        assert main(["run"]) == 70
        assert ("Traceback" in capsys.readouterr().err) is expected
    monkeypatch.delenv(entry.TRACEBACK)
    assert main(["-v", "run"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("leaving", "code"), [(SystemExit(), 0), (SystemExit(2), 2), (SystemExit("text"), 70)]
)
def test_an_exit_inside_a_verb_is_its_code(
    verb: ModuleType, leaving: SystemExit, code: int
) -> None:
    failing(verb, leaving)
    assert main(["run"]) == code


def test_an_interrupt_is_130_and_silent(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(verb, KeyboardInterrupt())
    assert main(["run"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_termination_is_143_silent_and_closes_what_is_open(
    verb: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    def work(arguments: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            closed.append(True)
        return 0

    verb.main = work  # type: ignore[attr-defined]
    assert main(["run"]) == 143
    assert closed and capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_that_arrives_in_a_destructor_still_ends_the_verb(
    verb: ModuleType, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dropped:
        def __del__(self) -> None:
            signal.raise_signal(number)  # Python drops what the handler raises here

    def wait(arguments: list[str]) -> int:
        del arguments
        dropped = Dropped()
        del dropped
        time.sleep(600)
        return 0

    verb.main = wait  # type: ignore[attr-defined]
    hook = sys.unraisablehook
    assert main(["run"]) == code
    assert capsys.readouterr().err == ""
    assert sys.unraisablehook is hook
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


CONFIG = "import sys; from headstock.cli.main import main; sys.exit(main(['config', 'show']))"


@pytest.mark.parametrize(("redirection", "code", "message"), [
    (">&-", 0, ""),
    ("2>&-", 0, ""),
    (">&- 2>&- <&-", 0, ""),
    (">/dev/full", 1, ("headstock: cannot write output: No space left on device; make room, or "
                      "write elsewhere\n")),
])  # fmt: skip
def test_closed_and_full_streams_are_no_traceback(
    redirection: str, code: int, message: str
) -> None:
    command = f'"{sys.executable}" -c "{CONFIG}" {redirection}'
    process = subprocess.run(
        ["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False, timeout=600
    )
    assert (process.returncode, process.stderr) == (code, message)


def test_a_reader_that_leaves_is_no_noise() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", CONFIG],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=600,
    )
    os.close(writer)
    assert process.stderr == ""
    assert process.returncode == 141


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_device_memory_is_extended_unless_the_user_set_the_allocator_up(
    name: str, verb: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    verb.main = lambda arguments: (
        seen.append({variable: os.environ.get(variable) for variable in ALLOCATOR}) or 0
    )  # type: ignore[attr-defined]
    for variable in ALLOCATOR:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    main(["run"])
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "max_split_size_mb:128")
    main(["run"])

    assert seen[0] == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": None,
    }
    assert seen[1] == dict.fromkeys(ALLOCATOR) | {name: "max_split_size_mb:128"}


def test_a_verb_of_a_plugin_that_is_no_function_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = InstalledPlugin(
        kind="command",
        name="hum",
        distribution="hum-verb",
        version="1",
        target="hum:spec",
        status="ok",
    )
    spec = CommandSpec(name="hum", spi=SpiRange(0, 3), summary="", implementation="math:pi")
    monkeypatch.setattr(registry, "list_installed", lambda kind=None: (plugin,))
    monkeypatch.setattr(registry, "load_spec", lambda kind, name: spec)
    assert main(["hum"]) == 3
    assert capsys.readouterr().err == (
        "headstock: verb 'hum': math:pi: expected main(arguments) -> int, got 3.141592653589793\n"
    )


def test_a_command_that_returns_no_exit_code_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = CommandSpec(name="bench", spi=SpiRange(0, 3), summary="", implementation="hum:main")
    monkeypatch.setattr(registry, "load_spec", lambda kind, name: spec)
    monkeypatch.setattr(registry, "import_implementation", lambda spec: lambda arguments: None)
    assert main(["bench"]) == 3
    assert capsys.readouterr().err == (
        "headstock: verb 'bench': hum:main: expected an exit code, got None\n"
    )


def test_a_command_of_ours_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entries, "read_distributions", lambda: ())
    assert main(["bench", "cpu1"]) == 2
    assert capsys.readouterr().err == (
        "headstock: command 'bench' is not installed; install it with: pip install "
        "./plugins/bench (in a checkout of headstock); installed: none\n"
    )
    assert main(["bnech"]) == 2
    assert capsys.readouterr().err == "headstock: unknown verb 'bnech'; did you mean bench?\n"


def test_a_command_can_be_named_with_its_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["headstock-bench:bench", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: headstock bench ")
    assert main(["hum-verb:bench", "--help"]) == 2
    assert "no command 'hum-verb:bench' is installed" in capsys.readouterr().err


def test_unknown_verbs_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in [
        (["rnu"], "headstock: unknown verb 'rnu'; did you mean run?\n"),
        (["zzzzzz"], "headstock: unknown verb 'zzzzzz'; see 'headstock --help'\n"),
        (["--hlep"], "headstock: unknown flag '--hlep'; see 'headstock --help'\n"),
        (["x" * 999], f"headstock: unknown verb '{'x' * 61}...'; see 'headstock --help'\n"),
    ]:
        assert main(arguments) == 2
        assert capsys.readouterr().err == message


def test_the_distribution_of_two_commands_says_what_each_does() -> None:
    project = tomllib.loads((ROOT / "plugins/bench/pyproject.toml").read_text("utf-8"))["project"]
    parts = project["description"].split("; ")
    assert [part.partition(": ")[0] for part in parts] == sorted(
        project["entry-points"]["headstock.command"]
    )


def test_help_says_of_each_command_of_a_distribution_what_it_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, summary, commands in (
        ("one", "draws: one picture; or more", "draw"),
        ("two", "hum: hum a tune; whistle: whistle it, loudly", "hum whistle"),
        ("three", "sing and dance", "sing dance"),
    ):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\nSummary: {summary}\n")
        lines = "".join(f"{command} = {name}:spec\n" for command in commands.split())
        (folder / "entry_points.txt").write_text(f"[headstock.command]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert main(["--help"]) == 0

    text = capsys.readouterr().out
    said = {}
    for line in text.splitlines():
        if match := re.match(r"  (\w+) {2,}(.+)", line):
            said[match[1]] = match[2]
    unknown = "a command of three; its own --help says what it does"
    assert (said["draw"], said["hum"]) == ("draws: one picture; or more", "hum a tune")
    assert said["whistle"] == "whistle it, loudly"
    assert (said["sing"], said["dance"]) == (unknown, unknown)
