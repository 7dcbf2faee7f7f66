"""`headstock config`, and the rows that are shown through it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstock.cli.main import main
from headstock.config import PRESETS
from headstock.config.catalog import engine_settings, sampling_settings
from headstock.config.reference import render_page


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings of the shell that runs the tests."""
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    for key in engine_settings():
        monkeypatch.delenv(f"HEADSTOCK_{key.upper()}", raising=False)


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """What `config show --json` prints under the flags."""
    assert main(["config", "show", "--json", *flags]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def read_error(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line on standard error when `config show` refuses the flags."""
    assert main(["config", "show", *flags]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    return error.strip()


def test_every_setting_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(capsys)
    assert list(printed["settings"]) == [*engine_settings(), *sampling_settings()]
    assert all(entry["origin"] == "default" for entry in printed["settings"].values())
    assert printed["settings"]["cache_type"] == {
        "value": "radix",
        "origin": "default",
        "source": None,
    }


@pytest.mark.feature("H8")
def test_the_effective_configuration_shows_origins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.toml"
    path.write_text("page_size = 32\ntp = 2\n", encoding="utf-8")
    monkeypatch.setenv("HEADSTOCK_OVERLAP", "0")
    flags = ["--config", str(path), "--preset", "low-latency", "--tp", "4"]
    settings = shown(capsys, *flags)["settings"]
    assert settings["tp"] == {"value": 4, "origin": "flag", "source": "--tp"}
    assert settings["overlap"] == {
        "value": False,
        "origin": "environment",
        "source": "HEADSTOCK_OVERLAP",
    }
    assert settings["page_size"] == {"value": 32, "origin": "file", "source": str(path)}
    assert settings["max_running_requests"] == {
        "value": 8,
        "origin": "preset",
        "source": "low-latency",
    }
    assert main(["config", "show", *flags]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["overlap", "off", "environment", "HEADSTOCK_OVERLAP"] in lines
    assert ["page_size", "32", "file", str(path)] in lines


@pytest.mark.feature("T19", "G1")
def test_the_effective_value_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, expected in {
        "on": True,
        "1": True,
        "true": True,
        "off": False,
        "0": False,
        "false": False,
    }.items():
        monkeypatch.setenv("HEADSTOCK_OVERLAP", text)
        assert shown(capsys)["settings"]["overlap"]["value"] is expected
    monkeypatch.setenv("HEADSTOCK_OVERLAP", "perhaps")
    words = "on, off, 1, 0, true, false, auto"
    assert (
        read_error(capsys) == f"headstock: HEADSTOCK_OVERLAP: expected one of {words}, got perhaps"
    )


@pytest.mark.feature("T4", "P5")
def test_two_pool_sizes_name_both_flags(capsys: pytest.CaptureFixture[str]) -> None:
    line = read_error(capsys, "--num-pages", "8", "--pa-memory-mb", "5")
    assert "(--num-pages) 8" in line and "(--pa-memory-mb) 5" in line


@pytest.mark.feature("P1")
def test_paged_attn_lists_the_three(capsys: pytest.CaptureFixture[str]) -> None:
    line = read_error(capsys, "--paged-attn", "maybe")
    assert "(--paged-attn): expected one of auto, on, off, got maybe" in line


@pytest.mark.feature("S13")
def test_three_backends_are_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    said = read_error(capsys, "--attn", "a,b,c")
    assert "expected one name, or two as PREFILL,DECODE" in said and "got a,b,c" in said


@pytest.mark.feature("H1", "H2", "H3", "H4", "H7")
@pytest.mark.parametrize(
    ("flag", "value", "rule"),
    [
        ("--block-size", "0", "1 or more"),
        ("--max-num-blocks", "0", "1 or more"),
        ("--max-batch-size", "0", "1 or more"),
        ("--max-queued-requests", "0", "1 or more"),
        ("--memory-threshold", "1.5", "a number between 0.0 and 1.0"),
        ("--memory-threshold", "nan", "a number between 0.0 and 1.0"),
        ("--memory-threshold", "inf", "a number between 0.0 and 1.0"),
        ("--max-itl-ms", "0", "a number above 0"),
        ("--memory-ratio", "nan", "a number above 0.0 and at most 1.0"),
    ],
)
def test_limits(capsys: pytest.CaptureFixture[str], flag: str, value: str, rule: str) -> None:
    line = read_error(capsys, flag, value)
    assert f"({flag}): expected " in line and f"{rule}, got {value}" in line


@pytest.mark.feature("H5", "H6")
def test_limits_between_settings(capsys: pytest.CaptureFixture[str]) -> None:
    line = read_error(capsys, "--max-model-len", "15", "--block-size", "16")
    assert "(--max-seq-len)" in line and "(--page-size) 16" in line and "got 15" in line
    line = read_error(capsys, "--max-batch-tokens", "7", "--max-seqs", "8")
    assert "(--max-running-requests) 8" in line and "got 7" in line
    printed = shown(capsys, "--max-batch-tokens", "7")
    assert printed["settings"]["max_running_requests"]["value"] == 7
    assert "is cut to max_batch_tokens (--max-batch-tokens) 7" in printed["notes"][0]


@pytest.mark.feature("S25", "H17")
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_parses_and_is_in_effect(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    settings = shown(capsys, "--preset", name)["settings"]
    for key, value in PRESETS[name].items():
        assert settings[key] == {"value": value, "origin": "preset", "source": name}
    assert {key for key, entry in settings.items() if entry["origin"] == "preset"} == set(
        PRESETS[name]
    )


@pytest.mark.feature("S25")
def test_what_the_presets_set() -> None:
    assert {name: len(values) for name, values in PRESETS.items()} == {
        "max-throughput": 4,
        "low-latency": 5,
        "memory-constrained": 5,
        "long-context": 7,
        "debug": 5,
    }
    assert PRESETS["max-throughput"]["max_batch_tokens"] == 16384
    assert PRESETS["low-latency"]["memory_threshold"] == 0.8
    assert PRESETS["memory-constrained"]["memory_ratio"] == 0.7
    assert PRESETS["long-context"]["max_seq_len"] == 32768
    assert PRESETS["debug"]["log_level"] == "DEBUG"


@pytest.mark.feature("S25")
def test_a_size_given_replaces_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    settings = shown(capsys, "--preset", "memory-constrained", "--num-pages", "100")["settings"]
    assert settings["num_pages"]["value"] == 100
    assert settings["memory_ratio"] == {"value": 0.9, "origin": "default", "source": None}
    assert settings["max_running_requests"]["value"] == 16


def test_unknown_keys_and_presets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text("page_sise = 32\n", encoding="utf-8")
    assert read_error(capsys, "--config", str(path)).endswith(
        "unknown setting 'page_sise'; did you mean page_size?"
    )
    assert read_error(capsys, "--preset", "debgu").endswith("; did you mean debug?")
    assert read_error(capsys, "--overlpa").endswith(
        "unknown flag --overlpa; did you mean --overlap?"
    )
    assert main(["config", "show", "--config", str(tmp_path / "none.toml")]) == 6
    assert "No such file" in capsys.readouterr().err


def test_presets_and_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        name: dict(values) for name, values in PRESETS.items()
    }
    assert main(["config", "presets"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in PRESETS)
    assert main(["config", "reference"]) == 0
    assert capsys.readouterr().out == render_page()
    assert main(["config"]) == 2
