"""What the hints say of this project's own plugins is what its members declare."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from source_tree import PLUGINS, ROOT, read_groups, read_project

from headstock import registry
from headstock.cli.main import main
from headstock.errors import CannotRun, ModelError, UnknownPlugin
from headstock.registry import InstalledPlugin
from headstock.registry.first_party import (
    CONFORMANCE_LINE,
    FOLDERS,
    install_lines,
    upgrade_line,
)
from headstock.spi import SPI, PluginSpec, Require
from headstock.startup.model_loading import locate_model, read_model


def test_the_table_is_what_the_members_declare() -> None:
    declared = {}
    for member in PLUGINS:
        groups = {
            group.removeprefix("headstock."): tuple(names)
            for group, names in read_groups(member).items()
        }
        if groups:
            declared[str(member.relative_to(ROOT))] = (read_project(member)["name"], groups)
    assert {folder: (name, dict(kinds)) for folder, (name, kinds) in FOLDERS.items()} == declared


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No distribution has an entry point."""
    monkeypatch.setattr("headstock.registry.entries.read_distributions", lambda: ())


@pytest.mark.usefixtures("nothing_installed")
def test_an_absent_plugin_of_ours_comes_with_its_pip_line() -> None:
    with pytest.raises(UnknownPlugin) as caught:
        registry.load_spec("attention", "spda")
    assert "did you mean sdpa?" in str(caught.value)
    assert "installed: none" in str(caught.value)
    assert "not installed: sdpa: pip install ./backends/sdpa (in a checkout of headstock)" in str(
        caught.value
    )


@pytest.mark.usefixtures("nothing_installed")
def test_the_name_of_an_absent_plugin_of_ours_is_not_suggested_in_place_of_itself() -> None:
    with pytest.raises(UnknownPlugin) as caught:
        registry.load_spec("attention", "sdpa")
    line = "pip install ./backends/sdpa (in a checkout of headstock)"
    assert str(caught.value) == (
        f"attention backend 'sdpa' is not installed; install it with: {line}; installed: none"
    )


def write_model(directory: Path, architecture: str) -> Path:
    """A model directory of an architecture, without weights."""
    (directory / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return directory


@pytest.mark.usefixtures("nothing_installed")
def test_an_absent_family_of_ours_and_the_demo_model_come_with_their_pip_lines(
    tmp_path: Path,
) -> None:
    with pytest.raises(CannotRun) as family:
        read_model(write_model(tmp_path, "Qwen3ForCausalLM"))
    assert str(family.value) == (
        "the model family of Qwen3ForCausalLM is not installed; install it with: pip install "
        "./models/qwen (in a checkout of headstock)"
    )
    with pytest.raises(ModelError) as demo:
        locate_model("demo")
    assert str(demo.value) == (
        "the model 'demo' is not installed; install it with: pip install ./models/demo (in a "
        "checkout of headstock)"
    )


@pytest.mark.parametrize(
    "architecture", ["CohereForCausalLM", "NewForCausalLM", "JambaForCausalLM", "BertModel"]
)
def test_an_architecture_that_nobody_serves_is_answered_with_how_to_list_those_served(
    tmp_path: Path, architecture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CannotRun) as caught:
        read_model(write_model(tmp_path, architecture))
    message = str(caught.value)
    assert main(["plugins", "list", "model"]) == 0
    _, *served = capsys.readouterr().out.splitlines()
    assert message == (
        f"no installed model family serves the architecture {architecture}, nor does "
        "transformers: config.json has no model_type; 'headstock plugins list model' shows the "
        f"{len(served) - 1} architectures served; docs/plugins.md says how to add a family"
    )


@pytest.mark.full
def test_the_pip_lines_for_plugins_of_ours_can_be_followed_in_a_checkout() -> None:
    lines = [
        upgrade_line("headstock"),
        CONFORMANCE_LINE,
        *(line for kind in SPI for line in install_lines(kind).values()),
    ]
    paths = sorted(
        {
            path
            for line in lines
            for path in re.findall(r"pip install (?:--upgrade )?(\./\S+) ", line)
        }
    )
    assert len(paths) == len(FOLDERS) + 2
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    result = subprocess.run(
        [*pip, "--ignore-installed", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    (would,) = (line for line in result.stdout.splitlines() if line.startswith("Would install "))
    expected = {"headstock", "headstock-conformance", *(name for name, _ in FOLDERS.values())}
    assert {item.rpartition("-")[0] for item in would.split()[2:]} == expected


def read_hints(need: Require) -> list[str]:
    """The hints of a requirement and of its alternatives."""
    return [need.hint, *(hint for item in need.any_of for hint in read_hints(item))]


LIBRARIES = sorted(
    {
        requirement
        for kind in SPI
        for plugin, spec in registry.load_specs(kind)
        if plugin.distribution.startswith("headstock") and isinstance(spec, PluginSpec)
        for need in spec.requires
        for hint in (*read_hints(need), registry.explain_missing_extras(plugin))
        for requirement in re.findall(r"'([^']+)'", hint)
        # Members of this project have one version, and are no libraries of an index.
        if not requirement.startswith("headstock-")
    }
)
"""What the hints of this project's plugins have pip install, beside each other."""


@pytest.mark.parametrize("requirement", LIBRARIES)
def test_a_hint_names_a_requirement_that_pip_can_read(requirement: str) -> None:
    assert Requirement(requirement).specifier


@pytest.mark.full  # it needs a package index
@pytest.mark.parametrize("requirement", LIBRARIES)
def test_a_hint_names_what_the_package_index_has(requirement: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed"]
    result = subprocess.run(
        [*pip, requirement], capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert "Would install" in result.stdout


def test_another_distribution_is_upgraded_by_its_name() -> None:
    assert upgrade_line("somebody-elses") == "pip install --upgrade somebody-elses"


OURS = [item for item in registry.list_installed() if item.distribution.startswith("headstock")]


@pytest.mark.parametrize("plugin", OURS, ids=lambda item: f"{item.kind}:{item.name}")
def test_every_plugin_of_ours_can_be_chosen_or_says_what_to_install(
    plugin: InstalledPlugin,
) -> None:
    spec = registry.load_spec(plugin.kind, plugin.name)
    assert spec.summary
    if isinstance(spec, PluginSpec):
        assert registry.import_implementation(spec) is not None
        assert (registry.make_options(spec) is None) == (spec.options is None)
        assert all(reason.hint for reason in registry.find_missing(spec))
    else:
        assert Path(spec.directory).is_absolute()
