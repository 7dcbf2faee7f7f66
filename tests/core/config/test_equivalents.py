"""What other engines call by names of their own is answered with what does the same here."""

from __future__ import annotations

import re

import pytest

from headstock import LLM
from headstock.cli.main import main
from headstock.config.catalog import engine_settings, keyword_names
from headstock.config.equivalents import EQUIVALENTS
from headstock.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        (
            "enforce_eager",
            False,
            'CUDA graphs are replayed where the backend allows it; runner="eager" runs without',
        ),
        ("trust_remote_code", True, "code out of a model's directory is never run"),
        (
            "quantization",
            "awq",
            (
                "config.json says how weights are quantized, and nothing quantizes them here; "
                'kv_dtype="fp8_e4m3" stores the KV pool in 8 bits'
            ),
        ),
        (
            "enable_prefix_caching",
            True,
            'prefixes are reused by default; cache_type="naive" turns that off',
        ),
        (
            "swap_space",
            4,
            "no pages are swapped to the host; a preempted request is recomputed",
        ),
    ],
)
def test_a_keyword_of_vllm_is_answered_with_its_equivalent(
    name: str, value: object, answer: str
) -> None:
    with pytest.raises(UsageError) as caught:
        LLM("demo", **{name: value})  # type: ignore[arg-type]
    assert str(caught.value) == f"{name}={value}: unknown setting '{name}'; {answer}"


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        (
            "--enforce-eager",
            "CUDA graphs are replayed where the backend allows it; --runner eager runs without",
        ),
        (
            "--no-enable-prefix-caching",
            "prefixes are reused by default; --cache-type naive turns that off",
        ),
        (
            "--swap-space=4",
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
        UsageError, match="unknown setting 'swap_space'; no pages are swapped to the host; "
    ):
        LLM("demo", config=file)


def test_the_table_names_no_setting_of_headstock_and_only_flags_that_are_there() -> None:
    assert not EQUIVALENTS.keys() & keyword_names().keys()
    flags = {flag for text in EQUIVALENTS.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert flags <= {setting.flag for setting in engine_settings().values()} and "--runner" in flags
