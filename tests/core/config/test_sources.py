"""Where values come from, and which one wins."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstock.config import (
    PRESETS,
    FlagParser,
    ResolvedConfig,
    add_engine_flags,
    add_sampling_flags,
    make_engine_config,
    resolve_flags,
)
from headstock.config.catalog import engine_settings
from headstock.errors import HeadstockError, ModelError, UsageError


def resolve_line(line: str = "", environ: dict[str, str] | None = None) -> ResolvedConfig:
    """What is in effect for the flags of a command line."""
    parser = FlagParser(prog="headstock run")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    return resolve_flags(parser.parse_args(line.split()), environ or {})


def refused(
    line: str = "", environ: dict[str, str] | None = None, kind: type[HeadstockError] = UsageError
) -> str:
    """What is said of flags that are refused: always one line."""
    with pytest.raises(kind) as raised:
        resolve_line(line, environ)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def written(folder: Path, text: str, name: str = "engine.toml") -> str:
    """The path of a file with the text."""
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@pytest.mark.feature("H8")
def test_a_partial_file_and_the_command_line_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "page_size = 32\nmax-queued-requests = 9\n")
    resolved = resolve_line(f"--config {path} --page-size 8")
    assert (resolved.engine.page_size, resolved.engine.max_queued_requests, resolved.engine.tp) == (
        8,
        9,
        1,
    )
    assert resolved.origins["page_size"] == "flag --page-size"
    assert resolved.origins["max_queued_requests"] == f"file {path}"
    assert resolved.origins["tp"] == "default"


RANKS = ("flag", "environment", "file", "preset")


@pytest.mark.feature("H8")
@given(st.sets(st.sampled_from(RANKS)), st.sampled_from(["TOML", "JSON"]))
def test_the_highest_rank_wins(present: set[str], form: str) -> None:
    line, environ, values = "", {}, {"flag": 11, "environment": 22, "file": 33, "preset": 64}
    with tempfile.TemporaryDirectory() as folder:
        if "flag" in present:
            line += " --max-queued-requests 11"
        if "environment" in present:
            environ["HEADSTOCK_MAX_QUEUED_REQUESTS"] = "22"
        if "file" in present:
            text = "max_queued_requests = 33" if form == "TOML" else '{"max_queued_requests": 33}'
            line += f" --config {written(Path(folder), text, f'engine.{form.lower()}')}"
        if "preset" in present:
            line += " --preset low-latency"
        resolved = resolve_line(line, environ)
    winner = next((rank for rank in RANKS if rank in present), None)
    assert resolved.engine.max_queued_requests == (1024 if winner is None else values[winner])
    assert resolved.origins["max_queued_requests"].split()[0] == (winner or "default")


VALUES = {
    "page_size": st.integers(1, 64),
    "tp": st.integers(1, 8),
    "overlap": st.booleans(),
    "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    "memory_threshold": st.floats(0, 1),
    "cuda_graph_max_bs": st.integers(0, 64),
}


@pytest.mark.feature("H8")
@given(
    *[st.fixed_dictionaries({}, optional=VALUES) for _ in range(3)],
    st.sampled_from([None, *PRESETS]),
)
def test_each_setting_is_merged_on_its_own(
    flags: dict[str, object],
    environ: dict[str, object],
    file: dict[str, object],
    preset: str | None,
) -> None:
    def shown(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    line = " ".join(f"--{key.replace('_', '-')} {shown(value)}" for key, value in flags.items())
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), json.dumps(file), "engine.json")
        line += f" --config {path}" + (f" --preset {preset}" if preset else "")
        resolved = resolve_line(
            line, {f"HEADSTOCK_{key.upper()}": shown(value) for key, value in environ.items()}
        )
    for key, setting in engine_settings().items():
        if key not in VALUES:
            continue
        ranked = (flags, environ, file, PRESETS[preset] if preset else {})
        expected = next((source[key] for source in ranked if key in source), setting.default)
        assert getattr(resolved.engine, setting.name) == expected


@pytest.mark.feature("T19", "G1")
@pytest.mark.parametrize("text", ["on", "1", "true", "TRUE", "off", "0", "false", "Off"])
def test_switches_by_flag_and_environment(text: str) -> None:
    expected = text.lower() in ("on", "1", "true")
    for name in ("overlap", "kv_cache", "debug_invariants"):
        flag, variable = "--" + name.replace("_", "-"), f"HEADSTOCK_{name.upper()}"
        assert getattr(resolve_line(f"{flag} {text}").engine, name) is expected
        assert getattr(resolve_line(f"{flag}={text}").engine, name) is expected
        assert getattr(resolve_line("", {variable: text}).engine, name) is expected
        assert getattr(resolve_line(flag).engine, name) is True
        assert getattr(resolve_line(f"--no-{flag[2:]}").engine, name) is False


@pytest.mark.feature("T19", "G1")
def test_other_words_are_errors() -> None:
    words = "on, off, 1, 0, true, false"
    assert (
        refused("--kv-cache maybe") == f"kv_cache (--kv-cache): expected one of {words}, got maybe"
    )
    assert (
        refused("", {"HEADSTOCK_OVERLAP": "yes"})
        == f"HEADSTOCK_OVERLAP: expected one of {words}, auto, got yes"
    )


def test_overlap_is_left_to_the_device_unless_it_is_given() -> None:
    assert resolve_line("").engine.overlap is resolve_line("--overlap auto").engine.overlap is None


@pytest.mark.feature("T4", "P5")
def test_two_pool_sizes_are_one_error() -> None:
    sizes = {
        "--num-pages": "8",
        "--memory-ratio": "0.9",
        "--kv-memory-mb": "5",
        "--kv-context-len": "99",
    }
    for first in sizes:
        for second in sizes:
            if first < second:
                message = refused(f"{first} {sizes[first]} {second} {sizes[second]}")
                assert f"({first}) {sizes[first]}" in message
                assert f"({second}) {sizes[second]}" in message
                assert "at most one of" in message
    assert "HEADSTOCK_NUM_PAGES=8 and HEADSTOCK_KV_MEMORY_MB=5" in refused(
        "", {"HEADSTOCK_NUM_PAGES": "8", "HEADSTOCK_KV_MEMORY_MB": "5"}
    )


@pytest.mark.feature("S25")
def test_a_size_of_a_higher_rank_replaces_the_presets() -> None:
    resolved = resolve_line("--preset long-context --num-pages 8 --page-size 32")
    assert (resolved.engine.num_pages, resolved.engine.memory_ratio, resolved.engine.page_size) == (
        8,
        0.9,
        32,
    )
    assert resolved.engine.page_size_or_less is False
    assert resolved.origins["memory_ratio"] == "default"
    assert resolved.notes == (
        "preset long-context: memory_ratio = 0.95: replaced by num_pages (--num-pages) 8",
    )
    resolved = resolve_line("--kv-memory-mb 64", {"HEADSTOCK_NUM_PAGES": "8"})
    assert (resolved.engine.kv_memory_mb, resolved.engine.num_pages) == (64, None)
    assert (
        resolve_line("--num-pages auto", {"HEADSTOCK_KV_MEMORY_MB": "64"}).engine.kv_memory_mb == 64
    )


@pytest.mark.feature("H6")
def test_running_requests_are_cut_aloud_unless_both_are_written() -> None:
    resolved = resolve_line("--max-batch-tokens 7")
    assert resolved.engine.max_running_requests == 7
    assert "256 is cut to max_batch_tokens (--max-batch-tokens) 7" in resolved.notes[0]
    resolved = resolve_line("--max-running-requests 8193")
    assert (resolved.engine.max_running_requests, resolved.engine.max_batch_tokens) == (8192, 8192)
    assert (
        resolved.origins["max_running_requests"]
        == "flag --max-running-requests (cut to max_batch_tokens)"
    )
    assert resolve_line("--max-running-requests 8192").notes == ()
    assert "got 7" in refused("--max-batch-tokens 7", {"HEADSTOCK_MAX_RUNNING_REQUESTS": "8"})
    assert (
        resolve_line("--preset low-latency --max-batch-tokens 5").engine.max_running_requests == 5
    )


@pytest.mark.parametrize(
    ("line", "field", "value", "note"),
    [
        (
            "--gpu-memory-utilization 0.8",
            "memory_ratio",
            0.8,
            "taken as memory_ratio (--memory-ratio) 0.8,",
        ),
        (
            "--max-total-tokens 999",
            "max_batch_tokens",
            999,
            "taken as max_batch_tokens (--max-batch-tokens) 999,",
        ),
        (
            "--graph 4",
            "cuda_graph_max_bs",
            4,
            "taken as cuda_graph_max_bs (--cuda-graph-max-bs) 4,",
        ),
        (
            "--max-num-seqs 4",
            "max_running_requests",
            4,
            "taken as max_running_requests (--max-running-requests) 4,",
        ),
    ],
)
def test_an_alias_that_means_something_else_elsewhere_is_said(
    line: str, field: str, value: object, note: str
) -> None:
    resolved = resolve_line(line)
    assert getattr(resolved.engine, field) == value
    assert len(resolved.notes) == 1
    flag, given = line.split()
    assert f"({flag}) {given}: {note}" in resolved.notes[0]


@pytest.mark.feature("G1")
def test_overlap_off_by_environment() -> None:
    resolved = resolve_line("", {"HEADSTOCK_OVERLAP": "0"})
    assert resolved.engine.overlap is False
    assert resolved.origins["overlap"] == "environment HEADSTOCK_OVERLAP"


@pytest.mark.feature("S24")
def test_log_level_by_environment() -> None:
    assert resolve_line("", {"LOG_LEVEL": "debug"}).engine.log_level == "DEBUG"
    both = resolve_line("", {"LOG_LEVEL": "DEBUG", "HEADSTOCK_LOG_LEVEL": "ERROR"})
    assert both.engine.log_level == "ERROR"
    assert resolve_line("--log-level WARNING", {"LOG_LEVEL": "DEBUG"}).engine.log_level == "WARNING"
    assert "LOG_LEVEL: expected one of DEBUG, INFO, WARNING, ERROR, CRITICAL, got loud" in refused(
        "", {"LOG_LEVEL": "loud"}
    )


def test_a_misspelt_variable_is_pointed_out() -> None:
    notes = resolve_line(
        "", {"HEADSTOCK_OVERLP": "0", "HEADSTOCK_TRACEBACK": "1", "HEADSTOCK_": "", "OTHER": "1"}
    ).notes
    assert notes == (
        "HEADSTOCK_OVERLP is not a setting and has no effect; did you mean HEADSTOCK_OVERLAP?",
    )
    assert resolve_line("", {"HEADSTOCK_TP": ""}).engine.tp == 1


@pytest.mark.parametrize("word", ["bogus", "verbose", "port", "threads", "gpus"])
def test_a_name_that_is_like_none_gets_no_suggestion(word: str) -> None:
    assert refused(f"--{word} 4") == f"unknown flag --{word}; see 'headstock run --help'"
    assert resolve_line("", {f"HEADSTOCK_{word.upper()}": "4"}).notes == ()


def test_file_with_tables_lists_aliases_and_sampling(tmp_path: Path) -> None:
    text = (
        'block_size = 4\nno_kv_cache = true\ntemperature = 0\nstop = ["a b", '
        '"c"]\n[opt.fa]\nnum_splits = 4\nx = "y"\n'
    )
    resolved = resolve_line(f"--config {written(tmp_path, text)}")
    assert (resolved.engine.page_size, resolved.engine.kv_cache) == (4, False)
    assert resolved.engine.opt == ("fa.num_splits=4", "fa.x=y")
    assert resolved.sampling == {"temperature": 0.0, "stop": ("a b", "c")}
    assert (
        resolve_line("", {"HEADSTOCK_CONFIG": str(tmp_path / "engine.toml")}).engine.page_size == 4
    )


@pytest.mark.feature("H8")
@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("page_sise = 4", "a.toml", "unknown setting 'page_sise'; did you mean page_size?"),
        ("page_size = 0", "a.toml", "a.toml: page_size: expected 1 or more, got 0"),
        ("page_size = 4\nblock_size = 4", "a.toml", "set the same value; keep one of them"),
        ("config = 'b.toml'", "a.toml", "a file cannot name another file"),
        ("opt = 3", "a.toml", "opt: expected a text or a list of texts"),
        ("[opt]\nfa = 3", "a.toml", "opt: expected tables of options, one table a plugin, got 3"),
        (
            '{"memory_threshold": NaN}',
            "a.json",
            "memory_threshold: expected a number between 0.0 and 1.0",
        ),
        ('{"tp": true}', "a.json", "tp: expected a whole number"),
        ("preset = 'low-latancy'", "a.toml", "preset: expected one of max-throughput"),
    ],
)
def test_a_wrong_entry_is_a_usage_error(tmp_path: Path, text: str, name: str, message: str) -> None:
    assert message in refused(f"--config {written(tmp_path, text, name)}")


@pytest.mark.feature("H8")
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("page_size =", "a.toml"),
        ("{", "a.json"),
        ("[1]", "a.json"),
        ('{"tp": 1, "tp": 2}', "a.json"),
        ("[" * 100000, "a.json"),
        ("page_size = " + "9" * 5000, "a.toml"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_model_error(tmp_path: Path, text: str, name: str) -> None:
    message = refused(f"--config {written(tmp_path, text, name)}", kind=ModelError)
    assert message.startswith("config (--config) ")
    assert len(message) < 260


@pytest.mark.feature("H8")
def test_no_file_a_folder_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"tp = \xff")
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "bytes.toml"):
        assert "config (--config)" in refused(f"--config {path}", kind=ModelError)


def test_unknown_flags_and_missing_values() -> None:
    assert refused("--page-sizes 4") == "unknown flag --page-sizes; did you mean --page-size?"
    assert refused("--zzz") == "unknown flag --zzz; see 'headstock run --help'"
    assert refused("--page-s 4").startswith("unknown flag --page-s")
    assert refused("word") == "unexpected argument word; see 'headstock run --help'"
    assert refused("--page-size").startswith("argument --page-size: expected one argument")


def test_sampling_flags_hold_only_what_was_given() -> None:
    assert resolve_line().sampling == {}
    resolved = resolve_line(
        "--max-tokens 5 --top-k -1 --seed 3 --stop a --stop b", {"HEADSTOCK_TEMPERATURE": "0"}
    )
    assert resolved.sampling == {
        "max_tokens": 5,
        "temperature": 0.0,
        "top_k": -1,
        "seed": 3,
        "stop": ("a", "b"),
    }
    assert resolved.engine.seed == 0
    assert resolve_line("--temperature auto", {"HEADSTOCK_TEMPERATURE": "0"}).sampling == {}


def test_a_gpu_is_another_word_for_cuda() -> None:
    assert make_engine_config(device="gpu").device == "cuda"
