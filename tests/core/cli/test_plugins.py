"""`headstock plugins` in this process; tests/plugins/broken runs the installed command."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from broken_plugins import Dist, scheduler_module, write_installed

from headstock import registry
from headstock.cli.plugins import main
from headstock.errors import PluginBroken, UsageError
from headstock.spi import SPI, DeviceEnv
from headstock.spi.versions import format_version


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_list_is_a_table_with_one_line_a_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = output(capsys, "list").splitlines()
    assert header.split() == ["KIND", "NAME", "DISTRIBUTION", "VERSION", "TARGET", "STATUS"]
    assert len(lines) == len(registry.list_installed())
    assert any(line.split()[:3] == ["cache", "radix", "headstock-radix-cache"] for line in lines)


def test_the_list_can_be_cut_to_one_kind_and_read_by_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = json.loads(output(capsys, "list", "cache", "--json"))
    assert {plugin["kind"] for plugin in listed} == {"cache"}
    assert {"naive", "radix"} <= {plugin["name"] for plugin in listed}


@pytest.mark.feature("S15")
@pytest.mark.parametrize(
    ("extras", "hint"),
    [
        ({"kernels": "no-such-kernels>=2"}, "pip install 'no-such-kernels>=2'"),
        (
            {"a": "no-such-kernels", "b": "pytest>=9999"},
            "pip install 'no-such-kernels' or pip install 'pytest>=9999'",
        ),
        (
            {"a": "no-such-kernels", "b": "cpu-built>=2"},  # the second is there, without kernels
            "a CUDA build of cpu-built instead of its CPU build or pip install 'no-such-kernels'",
        ),
        ({"a": "no-such-kernels", "b": "pytest>=1"}, ""),  # one way to have them is enough
        ({}, ""),
    ],
)
def test_the_list_says_what_would_complete_a_backend_without_running_its_code(
    extras: dict[str, str],
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = "raise SystemExit('plugin code was run')\n"
    write_installed(
        tmp_path,
        (
            Dist(
                name="kernel-user", plugin="hungry", module=module, kind="attention", extras=extras
            ),
        ),
    )
    (tmp_path / "cpu_built-2.1+cpu.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: cpu-built\nVersion: 2.1+cpu\n"
    (tmp_path / "cpu_built-2.1+cpu.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    (row,) = (
        plugin
        for plugin in json.loads(output(capsys, "list", "attention", "--json"))
        if plugin["name"] == "hungry"
    )
    assert (row["status"], row["hint"]) == ("incomplete" if hint else "ok", hint)
    assert main(["list", "attention"]) == 0
    shown = capsys.readouterr()
    (line,) = (row for row in shown.out.splitlines() if " hungry " in row)
    assert line.endswith(f"incomplete: {hint}" if hint else "ok")
    assert shown.err == "'headstock doctor' shows which of these can run on this machine\n"


def test_extras_that_bring_no_kernels_leave_a_plugin_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headstock.registry.extras.is_requirement_met", lambda *_, **__: False)
    hints = {row["name"]: row["hint"] for row in json.loads(output(capsys, "list", "--json"))}
    # Tracing of a server, and in core's own distribution the checks of plugins, are optional.
    assert [hints[name] for name in ("serve", "mixed", "eager", "torch")] == [""] * 4
    assert hints["fa"] != ""


def test_an_unknown_kind_comes_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean attention"):
        main(["list", "atention"])


def test_inspect_shows_spec_capabilities_contract_and_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = json.loads(output(capsys, "inspect", "radix", "--json"))
    assert facts["provided by"].startswith("headstock-radix-cache ")
    offered = format_version(SPI["cache"])
    assert facts["contract"] == f"cache 0.3, offered {offered}: ok"
    assert facts["capabilities"] == {
        "page_sizes": "any",
        "layouts": ["full", "latent", "state"],
        "windows": True,
        "reuse": True,
    }
    assert facts["options"]["max_prefixes"] is None
    text = output(capsys, "inspect", "radix")
    assert "  page_sizes  any\n" in text
    assert "  reuse       yes\n" in text
    assert re.search(r"^  debug +off$", text, re.M), "a default is spelt as --opt reads it"


@pytest.mark.feature("S15")
def test_inspect_says_what_is_missing_and_that_the_device_is_another(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for env, expected in (
        (
            DeviceEnv(device="cpu"),
            "cannot: it runs on cuda from sm_80, and this is cpu; 'headstock doctor' says what can",
        ),
        (DeviceEnv(device="cuda", capability=(9, 0)), "can"),
    ):
        monkeypatch.setattr("headstock.startup.device.describe_device", lambda asked, env=env: env)
        assert json.loads(output(capsys, "inspect", "fi", "--json"))["this machine"] == expected
        assert json.loads(output(capsys, "inspect", "radix", "--json"))["this machine"] == "can"
    monkeypatch.setitem(sys.modules, "headstock.startup.device", None)
    assert json.loads(output(capsys, "inspect", "fi", "--json"))["this machine"].startswith(
        "unknown: torch"
    )


@pytest.mark.feature("S15")
@pytest.mark.parametrize("name", ["fa", "fi", "trtllm", "sdpa"])
def test_inspect_and_list_agree_on_what_is_missing(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    listed = {
        plugin["name"]: plugin
        for plugin in json.loads(output(capsys, "list", "attention", "--json"))
    }
    missing = json.loads(output(capsys, "inspect", name, "--json"))["missing"]

    assert bool(missing) == (listed[name]["status"] != "ok")
    assert all(hint.startswith(("pip install ", "a CUDA build of ")) for hint in missing.values())


def test_inspect_shows_where_a_checkpoint_is(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(output(capsys, "inspect", "checkpoint:demo", "--json"))
    assert Path(facts["directory"]).name == "checkpoint"


def test_a_name_of_several_kinds_must_be_asked_for_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_installed(
        tmp_path, (Dist(name="other-radix", plugin="radix", module=scheduler_module("radix")),)
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="ask for cache:radix or scheduler:radix"):
        main(["inspect", "radix"])
    assert "other-radix 1.0" in output(capsys, "inspect", "scheduler:radix")
    assert "headstock-radix-cache" in output(capsys, "inspect", "cache:headstock-radix-cache:radix")


def test_a_name_of_two_distributions_must_be_asked_for_by_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dists = tuple(
        Dist(name=name, plugin="twin", module=scheduler_module("twin"))
        for name in ("twin-a", "twin-b")
    )
    write_installed(tmp_path, dists)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="choose with twin-a:twin or twin-b:twin"):
        main(["inspect", "twin"])
    assert "twin-b 1.0" in output(capsys, "inspect", "twin-b:twin")


def test_a_name_that_nobody_could_ask_for_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_installed(tmp_path, (Dist(name="loud", plugin="LOUD", module=scheduler_module("LOUD")),))
    monkeypatch.syspath_prepend(tmp_path)
    assert [
        plugin.status for plugin in registry.list_installed("scheduler") if plugin.name == "LOUD"
    ] == ["bad name"]
    with pytest.raises(PluginBroken, match=r"loud 1\.0.*cannot be used"):
        main(["inspect", "LOUD"])
