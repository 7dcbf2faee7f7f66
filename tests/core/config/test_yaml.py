"""Settings in a YAML file: the same keys and errors as in TOML and JSON, read by YAML 1.2's rules
for plain words.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from headstock.config import (
    EngineConfig,
    FlagParser,
    ResolvedConfig,
    add_engine_flags,
    add_sampling_flags,
    resolve_flags,
)
from headstock.errors import HeadstockError, ModelError, UsageError


def resolve_text(tmp_path: Path, text: str, name: str = "engine.yaml") -> ResolvedConfig:
    """The configuration that a file of this text sets."""
    (tmp_path / name).write_text(text, encoding="utf-8")
    parser = FlagParser(prog="headstock run")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    return resolve_flags(parser.parse_args(["--config", str(tmp_path / name)]), {})


def refused(tmp_path: Path, text: str, error: type[HeadstockError]) -> str:
    """What is said of a file of this text."""
    with pytest.raises(error) as raised:
        resolve_text(tmp_path, text)
    return str(raised.value)


@pytest.mark.feature("H8")
@pytest.mark.parametrize("name", ["engine.yaml", "engine.yml", "ENGINE.YAML"])
def test_a_yaml_file_sets_what_toml_and_json_do(tmp_path: Path, name: str) -> None:
    text = """
# a comment
block-size: 4
memory_ratio: 1e-1
no_kv_cache: true
record: null
temperature: 0
stop: ["a b", c]
opt:
  fa: {num_splits: 4, x: y}
"""
    resolved = resolve_text(tmp_path, text, name)
    assert resolved.engine == EngineConfig(
        page_size=4, memory_ratio=0.1, kv_cache=False, opt=("fa.num_splits=4", "fa.x=y")
    )
    assert resolved.sampling == {"temperature": 0.0, "stop": ("a b", "c")}
    assert resolved.origins["page_size"] == f"file {tmp_path / name}"


@pytest.mark.feature("H8")
def test_a_yaml_file_may_be_partial_or_empty(tmp_path: Path) -> None:
    assert (
        resolve_text(tmp_path, "").engine
        == resolve_text(tmp_path, "# nothing\n").engine
        == EngineConfig()
    )


@pytest.mark.feature("H8")
def test_on_and_off_are_words_and_digits_are_decimal_in_yaml(tmp_path: Path) -> None:
    text = "paged_attn: off\noverlap: off\nkv_cache: on\nmax_seq_len: 010\nrecord: off\n"
    resolved = resolve_text(tmp_path, text).engine
    assert resolved == EngineConfig(paged_attn="off", overlap=False, max_seq_len=10)
    assert resolve_text(tmp_path, "model: 2026-11-22\nrecord: 1:30\n").engine == EngineConfig(
        model="2026-11-22", record="1:30"
    )


@pytest.mark.feature("H8")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise: 4", "unknown setting 'page_sise'; did you mean page_size?"),
        ("4: 2", "unknown setting '4'"),
        ("page_size: 0", "page_size: expected 1 or more, got 0"),
        ("page_size: 4\nblock_size: 4", "set the same value; keep one of them"),
        ("config: b.toml", "a file cannot name another file"),
        ("memory_threshold: .nan", "memory_threshold: expected a number between 0.0 and 1.0"),
        ("overlap: no", "overlap: expected one of on, off, 1, 0, true, false"),
    ],
)
def test_a_wrong_entry_of_a_yaml_file_is_a_usage_error(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in refused(tmp_path, text, UsageError)


@pytest.mark.feature("H8")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp: 1\nattn: sdpa\ntp: 2", "not valid YAML: key tp comes twice, at line 3, column 1"),
        ("opt:\n  fa: {x: 1, x: 2}", "not valid YAML: key x comes twice, at line 2, column 14"),
        ("[1, 2]", "expected a mapping of settings, got list"),
        ("[a]: 2", "not valid YAML: expected one word or text as a key, at line 1, column 1"),
        (
            "tp: [1",
            "not valid YAML: expected ',' or ']', but got '<stream end>', at line 1, column 7",
        ),
        ("tp: 1\n---\ntp: 2", "not valid YAML: but found another document, at line 2, column 1"),
        (
            "model: !!python/object/apply:os.getcwd []",
            "could not determine a constructor for the tag",
        ),
        (
            "stop: &a [x]\nopt: *a",
            "not valid YAML: an alias (*a) is not supported; write the value out, at line 2",
        ),
        ("model: \x01", "not valid YAML: unacceptable character #x0001"),
        ("stop: " + "[" * 2000, "not valid YAML: "),
    ],
)
def test_a_file_that_is_no_yaml_is_a_model_error_with_the_line(
    tmp_path: Path, text: str, message: str
) -> None:
    resolved = refused(tmp_path, text, ModelError)
    assert resolved.startswith("config (--config) ") and message in resolved and len(resolved) < 300
