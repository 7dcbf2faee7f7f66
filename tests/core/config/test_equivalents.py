"""What other engines call by names of their own is answered with what does the same here."""

from __future__ import annotations

import re
from typing import Any

import pytest

from headstock import LLM, EngineConfig
from headstock.cli.main import main
from headstock.config.catalog import engine_settings, keyword_names
from headstock.config.effective import resolve_keywords
from headstock.config.equivalents import EQUIVALENTS, SAME, TAKEN
from headstock.config.flag_parser import FlagParser
from headstock.config.flags import add_engine_flags, resolve_flags
from headstock.errors import NotSupported, UsageError


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        (
            "disable_cuda_graph",
            1,
            "CUDA graphs are replayed where the backend allows it; runner (--runner) eager runs "
            "without",
        ),
        ("trust_remote_code", True, "code in a model's directory is never run"),
        (
            "quantization",
            "bitsandbytes",
            (
                "config.json says how a checkpoint is quantized; quant (--quant) fp8, int8 or int4 "
                "quantizes one at load; kv_dtype (--kv-dtype) fp8_e4m3 stores the KV pool in 8 bits"
            ),
        ),
        (
            "enable_prefix_caching",
            "yes",
            "prefixes are reused by default; cache_type (--cache-type) naive turns that off",
        ),
        (
            "swap_space",
            16,
            "no pages are swapped to the host; a preempted request is recomputed",
        ),
    ],
)
def test_a_keyword_of_vllm_is_answered_with_its_equivalent(
    name: str, value: object, answer: str
) -> None:
    with pytest.raises(NotSupported) as caught:
        LLM("demo", **{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name}={value} is not supported; {answer}"


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        (
            "--enforce-eager=maybe",
            "CUDA graphs are replayed where the backend allows it; runner (--runner) eager runs "
            "without",
        ),
        (
            "--enable-prefix-caching=3",
            "prefixes are reused by default; cache_type (--cache-type) naive turns that off",
        ),
        (
            "--swap-space=16",
            "no pages are swapped to the host; a preempted request is recomputed",
        ),
    ],
)
def test_a_flag_of_vllm_is_answered_with_its_equivalent(
    flag: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--prompt", "x", flag]) == 2
    assert (
        capsys.readouterr().err == f"headstock: unknown flag {flag.partition('=')[0]}; {answer}\n"
    )
    assert main(["replay", "file", flag]) == 2
    assert answer not in capsys.readouterr().err


def test_a_key_of_a_file_is_answered_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("settings") / "a.toml"
    file.write_text("swap-space = 4")
    with pytest.raises(
        NotSupported, match="swap_space is not supported; no pages are swapped to the host; "
    ):
        LLM("demo", config=file)


def test_the_table_names_no_setting_of_headstock_and_only_flags_that_are_there() -> None:
    assert not EQUIVALENTS.keys() & keyword_names().keys()
    flags = {flag for text in EQUIVALENTS.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert flags <= {setting.flag for setting in engine_settings().values()} and "--runner" in flags


@pytest.mark.parametrize(
    ("keywords", "flags", "note", "settings"),
    [
        ({"swap_space": 4}, ["--swap-space", "4"], "this is already the default", {}),
        (
            {"enable_prefix_caching": True},
            ["--enable-prefix-caching"],
            "this is already the default",
            {"cache_type": "radix"},
        ),
        (
            {"enable_prefix_caching": False},
            ["--no-enable-prefix-caching"],
            "taken as cache_type (--cache-type) naive",
            {"cache_type": "naive"},
        ),
        (
            {"enforce_eager": True},
            ["--enforce-eager"],
            "taken as runner (--runner) eager",
            {"runner": "eager"},
        ),
        ({"async_scheduling": False}, ["--no-async-scheduling"], "taken as", {"overlap": False}),
        ({"quantization": None}, ["--quantization", "null"], "this is already the default", {}),
        ({"quantization": "awq"}, ["--quantization", "awq"], "this is already the default", {}),
        ({"quantization": "fp8"}, ["--quantization", "fp8"], "taken as quant", {"quant": "fp8"}),
    ],
    ids=str,
)
def test_what_is_so_anyway_and_what_has_a_setting_is_taken_with_a_note(
    keywords: dict[str, Any], flags: list[str], note: str, settings: dict[str, Any]
) -> None:
    parser = FlagParser()
    add_engine_flags(parser)
    for resolved in (
        resolve_keywords(keywords, {}),
        resolve_flags(parser.parse_args(flags), {}),
    ):
        assert len(resolved.notes) == 1
        assert note in resolved.notes[0]
        for name, value in settings.items():
            assert getattr(resolved.engine, name) == value
    assert resolve_keywords({}, {}).notes == ()


def test_a_value_is_set_once_whatever_it_is_called() -> None:
    with pytest.raises(UsageError, match="set the same value"):
        resolve_keywords({"enforce_eager": True, "runner": "cudagraph"}, {})
    # 1 is not True
    with pytest.raises(NotSupported):
        resolve_keywords({"enforce_eager": 1}, {})


def test_each_meaning_is_a_setting_with_a_valid_value() -> None:
    for name, (value, setting, here) in TAKEN.items():
        assert name not in keyword_names() and name in EQUIVALENTS
        resolved = resolve_keywords({name: value}, {})
        assert getattr(resolved.engine, setting) == here
    for name, values in SAME.items():
        assert name not in keyword_names()
        for value in values:
            assert resolve_keywords({name: value}, {}).engine == EngineConfig()
