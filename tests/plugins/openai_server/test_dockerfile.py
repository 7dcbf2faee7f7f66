"""The Dockerfile, as far as it can be tried without Docker."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

import pytest
from source_tree import PLUGINS, ROOT

FILE = ROOT / "plugins" / "openai-server" / "Dockerfile"


def read_stages() -> dict[str, list[tuple[str, str]]]:
    """Stage -> its instructions, with lines joined."""
    text = re.sub(r"^\s*#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in filter(str.strip, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages[rest.split(" AS ")[1]] = stage = []
        stage.append((word, " ".join(rest.split())))
    return stages


def words(stage: str, name: str) -> list[str]:
    """The arguments of a stage's instructions of a name."""
    return [rest for word, rest in read_stages()[stage] if word == name]


def project(member: Path) -> dict[str, object]:
    data: dict[str, object] = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    return data


def test_versions_are_those_of_the_checkout() -> None:
    versions = {
        project(each)["name"]: project(each)["version"] for each in (ROOT / "core", *PLUGINS)
    }
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]
    )
    named = re.findall(r"([\w-]+)(?:\[\w+\])?==([\d.]+)", FILE.read_text())
    assert len(named) >= 2
    assert [(name, each) for name, each in named if (versions | pins)[name] != each] == []


@pytest.mark.feature("W15")
def test_the_extra_serve_brings_every_member_but_those_that_servers_do_not_need() -> None:
    names = {project(each)["name"] for each in PLUGINS}
    extra = project(ROOT / "core")["optional-dependencies"]["serve"]  # type: ignore[index]
    unneeded = {
        f"headstock-{each}"
        for each in "bench conformance demo naive-cache ray replay-view trtllm".split()
    }
    assert set(extra) == names - unneeded
    page = (ROOT / "docs" / "install.md").read_text().partition("| it leaves out |")[2]
    left_out = [row.split("|")[2] for row in page.partition("\n\n")[0].splitlines() if row]
    named = re.findall(r"`([\w-]+)`|(demo) model", " ".join(left_out))
    assert {plugin or model for plugin, model in named} == {
        *("bench", "replay-view", "headstock-conformance", "trtllm", "naive", "ray", "demo")
    }


def test_the_extra_all_brings_every_member_but_the_checks_of_plugins() -> None:
    extra = project(ROOT / "core")["optional-dependencies"]["all"]  # type: ignore[index]
    assert set(extra) == {project(each)["name"] for each in PLUGINS} - {"headstock-conformance"}


def test_pip_takes_nothing_of_headstock_from_an_index() -> None:
    lines = [line for stage in ("cpu", "cuda") for line in words(stage, "RUN")]
    ours = [line for line in lines if "headstock" in line]
    assert len(ours) == 2 and all("-c /wheels/ours.txt" in line for line in ours)
    names = {str(project(each)["name"]) for each in (ROOT / "core", *PLUGINS)}
    for member in (ROOT / "core", *PLUGINS):
        data = project(member)
        extras: dict[str, list[str]] = data.get("optional-dependencies", {})  # type: ignore[assignment]
        needed = [*data["dependencies"], *(each for extra in extras.values() for each in extra)]  # type: ignore[misc]
        found = {re.split(r"[^\w-]", each)[0] for each in needed if each.startswith("headstock")}
        assert found <= names


def test_every_name_is_listed_for_who_publishes() -> None:
    page = (ROOT / "docs" / "CONTRIBUTING.md").read_text().partition("## Release")[2]
    (command,) = re.findall(r"^ +(grep .+)$", page, re.MULTILINE)
    lines = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    names = {str(project(each)["name"]) for each in (ROOT / "core", *PLUGINS)}
    assert set(re.findall(r'"(.+)"', lines)) == names
    assert "`headstock-serve`" in page


def test_what_is_copied_is_there_and_nothing_else_is_sent() -> None:
    copied = [each.split()[0] for each in words("wheels", "COPY")]
    copied += [each.split()[0] for each in words("base", "COPY") if not each.startswith("--from")]
    assert all((ROOT / each).exists() for each in copied)
    everything, *rules = Path(f"{FILE}.dockerignore").read_text().split()
    assert everything == "*"
    sent = {rule[1:] for rule in rules if rule.startswith("!")}
    assert sent == set(copied)
    left_out = [rule for rule in rules if not rule.startswith("!")]
    for path in ("models/demo/training", "core/src/headstock/__pycache__"):
        assert any(fnmatch.fnmatch(path, rule) for rule in left_out)


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_server_is_no_root_and_gets_signals_itself(stage: str) -> None:
    assert words(stage, "USER") == ["10001"] and words(stage, "FROM") == [f"base AS {stage}"]
    assert words("base", "STOPSIGNAL") == ["SIGTERM"]
    (entry,) = words("base", "ENTRYPOINT")
    assert json.loads(entry) == ["headstock", "serve"]


@pytest.mark.feature("W15")
@pytest.mark.full
def test_its_run_lines_make_a_server_that_starts_and_ends(tmp_path: Path) -> None:
    venv.create(tmp_path / "python", with_pip=True)
    folder = tmp_path / "python" / "bin"
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": os.pathsep.join((str(folder), os.environ["PATH"])),
        "TORCH_OPTIONS": "",  # the index that pip uses here
    }

    def run(stage: str) -> None:
        for line in words(stage, "RUN"):
            if line.startswith("useradd"):
                continue
            command = line.replace("/wheels", f"{tmp_path}/wheels")
            command = command.replace("/constraints.txt", f"{ROOT}/constraints.txt")
            subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, check=True, timeout=600)

    for stage in ("wheels", "base", "cpu"):
        run(stage)
    assert len(list((tmp_path / "wheels").glob("*.whl"))) == 1 + len(PLUGINS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (entry,) = words("base", "ENTRYPOINT")
    program, *arguments = json.loads(entry)
    (health,) = (each.split("CMD ")[1] for each in words("base", "HEALTHCHECK"))
    check = [each.replace("8000", port) for each in json.loads(health)]
    process = subprocess.Popen(
        [folder / program, *arguments, "--port", port, "--model", "demo", "--num-pages", "64"],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert check != json.loads(health)
        check[0] = sys.executable
        end = time.monotonic() + 120
        while subprocess.run(check, capture_output=True, check=False).returncode:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()
