"""Metadata of other distributions, broken in any way, beside a plugin that is sound."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from broken_plugins import Dist, scheduler_module, write_installed
from hypothesis import given
from hypothesis import strategies as st
from often import often

from headstock import registry
from headstock.cli.main import list_plugin_commands, main
from headstock.distributions import InstalledDistribution, shield_torch
from headstock.errors import PluginBroken
from headstock.startup.device import read_versions

SOUND = Dist(name="sound-plugin", plugin="sound", module=scheduler_module("sound"))
METADATA = b"Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n"
PLUGIN = b"[headstock.scheduler]\nodd = odd_module:spec\n"


def write_foreign(folder: Path, entries: bytes | None, metadata: bytes | None = METADATA) -> None:
    """Write a distribution whose files are any bytes, beside the sound one."""
    info = folder / "foreign-1.0.dist-info"
    info.mkdir()
    for name, content in {"entry_points.txt": entries, "METADATA": metadata}.items():
        if content is not None:
            (info / name).write_bytes(content)
    write_installed(folder, (SOUND,))


def read_list(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, str]]:
    assert main(["plugins", "list", *arguments, "--json"]) == 0
    rows: list[dict[str, str]] = json.loads(capsys.readouterr().out)
    return rows


BROKEN_ENTRIES = [
    (b"[headstock.scheduler]\nhello\n", "unreadable", "in [headstock.scheduler]: 'hello'"),
    (bytes(range(256)), "unreadable", "entry_points.txt cannot be read: UnicodeDecodeError"),
    (b"[headstock.atention]\nu = a:b\n", "unknown kind", "did you mean attention?"),
    (b"[headstock.quant]\nq = a:b\n", "reserved kind", "got headstock.quant, reserved"),
    (b"[headstock.cache]\nodd = json\n", "bad target", "expected MODULE:FUNCTION, got 'json'"),
    (b"[headstock.cache]\n\x1b[31mred = a:b\n", "bad name", "expected [a-z][a-z0-9_-]*"),
    (b"[headstock.cache]\nodd = no_such_top:spec\n", "no module", "no module 'no_such_top'"),
    (b"[console_scripts]\nhello\n", "unreadable", "not NAME = MODULE:FUNCTION in [console_scripts"),
    (b"[headstock.scheduler]\nhello =\n", "unreadable", "in [headstock.scheduler]: 'hello'"),
    (b"[headstock.scheduler]\n= a:b\n", "unreadable", "in [headstock.scheduler]: 'a:b'"),
    (b"hello = a:b\n", "unreadable", "before its first [GROUP]: 'hello'"),
    ("[a]\nh\xe9 = a:b\n".encode("latin-1"), "unreadable", "cannot be read"),
    (b"[headstock]\nu = a:b\n", "unknown kind", ", got headstock"),
    (b"[headstock.]\nu = a:b\n", "unknown kind", ", got headstock."),
    (b"[Headstock.Cache]\nu = a:b\n", "unknown kind", "did you mean cache?"),
    (b"[headstock.weights]\nw = a:b\n", "reserved kind", "got headstock.weights, reserved"),
    (b"[headstock.cache]\nodd = a b : c\n", "bad target", "MODULE:FUNCTION, got 'a b : c'"),
    (b"[headstock.cache]\nodd = json.nothing:spec\n", "no module", "no module 'json.nothing'"),
]


@pytest.mark.parametrize(("entries", "status", "reason"), often(7, BROKEN_ENTRIES))
def test_the_list_says_what_is_broken_and_shows_all_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    entries: bytes,
    status: str,
    reason: str,
) -> None:
    before = read_list(capsys)
    write_foreign(tmp_path, entries)
    monkeypatch.syspath_prepend(tmp_path)

    rows = read_list(capsys)
    (broken,) = [row for row in rows if row["distribution"] == "foreign"]
    assert broken["status"] == status and reason in broken["hint"]
    assert [row for row in rows if row["distribution"] not in ("foreign", "sound-plugin")] == before
    assert registry.load_spec("scheduler", "sound").name == "sound"
    assert read_versions()["sound-plugin"] == "1.0"
    assert "bench" in list_plugin_commands()
    assert main(["plugins", "list"]) == 0
    text = capsys.readouterr().out
    assert reason in text and "\x1b" not in text


def test_the_list_of_a_kind_leaves_out_what_is_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_foreign(tmp_path, b"[headstock.quant]\nq = a:b\n[other]\nhello\n")
    monkeypatch.syspath_prepend(tmp_path)

    rows = read_list(capsys, "cache")
    (broken,) = [row for row in rows if row["distribution"] == "foreign"]
    assert broken["name"] == "hello", "it may hide a plugin of any kind"


@pytest.mark.parametrize(
    ("metadata", "name", "version"),
    [
        (None, "foreign", "1.0"),
        (b"", "foreign", "1.0"),
        (bytes(range(256)), "foreign", "1.0"),
        ("Name: foreign\nSummary: h\xe9\n".encode("latin-1"), "foreign", "1.0"),
        (b"Metadata-Version: 2.1\nVersion: 2.0\n", "foreign", "2.0"),
        (b"Metadata-Version: 2.1\nName: foreign\n", "foreign", "1.0"),
        (b"Name: foreign\nVersion: ?? none\n", "foreign", "?? none"),
        (b"Name: first\nName: second\nVersion: 1\nVersion: 2\n", "first", "1"),
        (b"Name: foreign\r\nVersion: 3\r\n\r\nName: other\r\n", "foreign", "3"),
    ],
)
def test_a_plugin_is_found_whatever_its_metadata_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    metadata: bytes | None,
    name: str,
    version: str,
) -> None:
    write_foreign(tmp_path, PLUGIN, metadata)
    (tmp_path / "odd_module.py").write_text(scheduler_module("odd"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_module", raising=False)

    (row,) = [row for row in read_list(capsys, "scheduler") if row["name"] == "odd"]
    assert (row["distribution"], row["version"], row["status"]) == (name, version, "ok")
    assert registry.load_spec("scheduler", f"{name}:odd").name == "odd"
    assert main(["plugins", "inspect", "odd"]) == 0


@pytest.mark.parametrize("needs", ["attrs >=>= 3", "@@@", "attrs", "foreign>=1"])
def test_extras_that_cannot_be_read_stop_no_list(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    needs: str,
) -> None:
    metadata = f"Name: foreign\nVersion: none\nRequires-Dist: {needs}; extra == 'x'\n"
    write_foreign(tmp_path, b"[headstock.attention]\nodd = json:loads\n", metadata.encode())
    monkeypatch.syspath_prepend(tmp_path)
    (row,) = [row for row in read_list(capsys, "attention") if row["name"] == "odd"]
    assert row["status"] == ("ok" if needs == "attrs" else "incomplete")


def test_a_target_that_names_no_function_is_refused_when_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_foreign(tmp_path, b"[headstock.scheduler]\nodd = json\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginBroken, match=r"foreign 1\.0.*expected MODULE:FUNCTION, got 'json'"):
        registry.load_spec("scheduler", "odd")


@given(entries=st.binary() | st.text().map(str.encode), metadata=st.binary())
def test_no_bytes_of_a_distribution_raise(entries: bytes, metadata: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        info = Path(name) / "some-1.0.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_bytes(entries)
        (info / "METADATA").write_bytes(metadata)
        read = InstalledDistribution(Distribution.at(info))
        assert read.name and isinstance(read.version, str)
        for line in read.read_entry_points():
            assert line.fault or (line.group and line.name and line.value)


WORDS = st.text("abcxyz019_.:- ", min_size=1).map(str.strip).filter(bool)


@given(
    st.lists(st.tuples(WORDS, st.lists(st.tuples(WORDS, WORDS))), unique_by=lambda each: each[0])
)
def test_sound_lines_are_read_as_the_standard_library_reads_them(
    groups: list[tuple[str, list[tuple[str, str]]]],
) -> None:
    text = "\n".join(
        line
        for group, pairs in groups
        for line in (f"[{group}]", "# a comment", *(f"{name} = {value}" for name, value in pairs))
    )
    with tempfile.TemporaryDirectory() as name:
        info = Path(name) / "some-1.0.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(text)
        distribution = Distribution.at(info)
        lines = InstalledDistribution(distribution).read_entry_points()
        expected = [(each.group, each.name, each.value) for each in distribution.entry_points]
    assert [(line.group, line.name, line.value) for line in lines] == expected
    assert not any(line.fault for line in lines)


MODULES = {
    "prints": "import os\nprint('PRINTED')\nos.write(1, b'WRITTEN')",
    "warns": "import warnings\nwarnings.warn('careful')",
    "raises": "raise RuntimeError('no')",
    "leaves": "raise SystemExit(0)",
    "breaks-syntax": "def (",
}


@pytest.mark.parametrize("command", often(1, ["run", "inspect", "doctor"]))
def test_plugins_that_print_never_reach_the_json_of_a_command(tmp_path: Path, command: str) -> None:
    dists = [
        Dist(name=name, plugin=name, module=f"{top}\n{scheduler_module(name)}")
        for name, top in MODULES.items()
    ]
    resolving = "print('RESOLVING')\n" + scheduler_module(
        "resolves",
        path="headstock.builtin.mixed:schedule",
        more=", resolve='resolves:resolve'",
    )
    resolving += "def resolve(query, env):\n    print('RESOLVED')\n"
    dists.append(Dist(name="resolves", plugin="resolves", module=resolving))
    write_installed(tmp_path, tuple(dists))
    write_foreign(tmp_path, b"[console_scripts]\nhello\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headstock", *arguments],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    if command == "inspect":
        inspected = run("plugins", "inspect", "prints", "--json")
        assert json.loads(inspected.stdout)["name"] == "prints"
        assert "PRINTED" in inspected.stderr and "WRITTEN" in inspected.stderr
    elif command == "run":
        more = ("--scheduler", "resolves", "-p", "Once", "--max-tokens", "2")
        answered = run("run", "--json", *more)
        (line,) = answered.stdout.splitlines()
        assert json.loads(line)["usage"]["completion_tokens"] == 2
        assert "RESOLVED" in answered.stderr
    else:
        checked = run("doctor", "--scheduler", "resolves", "--json")
        subjects = {each["subject"]: each for each in json.loads(checked.stdout)}
        assert subjects["scheduler prints"]["status"] == "PASS"
        assert subjects["scheduler raises"]["status"] == "FAIL"
        assert "not NAME = MODULE:FUNCTION" in subjects["hello"]["text"]
        assert "RESOLVED" in checked.stderr and "WRITTEN" in checked.stderr


def test_a_plugin_that_sets_signal_handlers_leaves_those_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = "import signal\nfor each in (signal.SIGINT, signal.SIGTERM):\n"
    module = f"{top}    signal.signal(each, signal.SIG_IGN)\n{scheduler_module('deaf')}"
    write_installed(tmp_path, (Dist(name="deaf", plugin="deaf", module=module),))
    monkeypatch.syspath_prepend(tmp_path)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    assert registry.load_spec("scheduler", "deaf").name == "deaf"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("is_broken", "value"), [(True, "0"), (False, None)])
def test_torch_looks_for_no_other_backends_where_it_could_not_read_them(
    is_broken: bool, value: str | None
) -> None:
    def read(group: str) -> None:
        assert group == "torch.backends"
        if is_broken:
            raise TypeError("missing 1 required positional argument: 'value'")

    environment: dict[str, str] = {}
    shield_torch(environment, read)
    assert environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == value


def test_an_llm_starts_beside_a_line_without_an_equals_sign(tmp_path: Path) -> None:
    write_foreign(tmp_path, b"[console_scripts]\nhello\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", "from headstock import LLM; print(LLM.__name__)"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.stdout == "LLM\n", done.stderr
