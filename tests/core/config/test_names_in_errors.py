"""Messages name a setting once, for Python and the command line alike, and quote the user."""

from __future__ import annotations

import logging
import re

import pytest

from headstock import LLM
from headstock.cli.main import main
from headstock.config import (
    EngineConfig,
    FlagParser,
    add_engine_flags,
    make_engine_config,
    resolve_flags,
    resolve_keywords,
)
from headstock.config.catalog import engine_settings, keyword_names
from headstock.config.setting import Setting
from headstock.config.value_types import Choice, Integer, Number, Switch, Text, Texts
from headstock.errors import HeadstockError, UsageError, name_setting

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def find_bad_value(setting: Setting) -> str:
    """A value that breaks the setting's rule; empty where only that does."""
    match setting.value_type:
        case Choice() | Switch() | Integer() | Number() | Texts():
            return "surely,wrong"
        case Text(word=word, pattern=pattern) if word is None and not re.fullmatch(pattern, "a b"):
            return "a b"
        case _:
            return ""


def resolve(*flags: str) -> EngineConfig:
    parser = FlagParser(prog="headstock run")
    add_engine_flags(parser)
    return resolve_flags(parser.parse_args(flags), {}).engine


@pytest.mark.parametrize("key", list(engine_settings()))
def test_a_refused_value_has_one_text_for_flags_keywords_and_fields(key: str) -> None:
    setting = engine_settings()[key]
    value = find_bad_value(setting)
    texts = set()
    for call in (
        lambda: resolve(f"{setting.flag}={value}"),
        lambda: make_engine_config(**{setting.name: value}),
        lambda: EngineConfig(**{setting.name: value}),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        texts.add(str(raised.value))
    (text,) = texts
    assert text.startswith(f"{setting.name} ({setting.flag}): expected ")
    assert f", got {value or repr(value)}" in text


@pytest.mark.parametrize("key", list(engine_settings()))
def test_an_alias_is_named_as_it_was_given(key: str) -> None:
    setting = engine_settings()[key]
    value = find_bad_value(setting)
    for flag in (alias for alias in setting.aliases if alias.startswith("--")):
        word = flag.removeprefix("--").replace("-", "_")
        assert keyword_names()[word].setting is setting
        texts = []
        with pytest.raises(UsageError) as raised:
            resolve(f"{flag}={value}")
        texts.append(str(raised.value))
        with pytest.raises(UsageError) as raised:
            make_engine_config(**{word: value})
        texts.append(str(raised.value))
        assert all(text.startswith(f"{word} ({flag}): expected ") for text in texts)


REFUSED = [
    ({"logits_processors": ["x", "x"]}, "logits_processors", "x"),
    ({"max_seq_len": 100_000}, "max_seq_len", "100000"),
    ({"page_size": 64, "max_seq_len": 3}, "max_seq_len", "3"),
    ({"max_batch_tokens": 7, "max_num_seqs": 8}, "max_batch_tokens", "7"),
    ({"runner": "cudagraph"}, "runner", "cudagraph"),
    ({"ops": "triton"}, "ops", "triton"),
    ({"tp": 2, "executor": "inline"}, "tp", "2"),
    ({"attn": "fa"}, "attn", "fa"),
    ({"num_pages": 8, "kv_memory_mb": 3}, "num_pages", "8"),
    ({"executor": "as is and of that"}, "executor", "as is and of that"),
    ({"chat_template": "no-such-file for --page-size 3.jinja"}, "chat_template", "--page-size 3"),
    ({"opt": ["a.b=--kv-cache off"]}, "opt", "a.b=--kv-cache off"),
    ({"model_family": "max_tokens"}, "model_family", "max_tokens"),
    ({"proposer": "with --overlap"}, "proposer", "with --overlap"),
    ({"tuned_choices": "~nobody-here/--attn fa"}, "tuned_choices", "~nobody-here/--attn fa"),
]


@pytest.mark.parametrize(("settings", "name", "value"), REFUSED, ids=str)
def test_python_and_the_command_line_read_one_text_with_the_users_value_in_it(
    settings: dict[str, object], name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HeadstockError) as raised:
        LLM("demo", **{"device": "cpu", **settings})  # type: ignore[arg-type]
    text = str(raised.value)
    assert name_setting(name) in text
    assert value in text.replace(name_setting(name), "")

    flags = [
        f"--{word.replace('_', '-')}={each}"
        for word, given in settings.items()
        for each in (given if isinstance(given, list) else [given])
    ]
    assert main(["run", "--prompt", "x", "--device", "cpu", *flags]) == type(raised.value).exit_code
    assert capsys.readouterr().err.splitlines()[-1] == f"headstock: {text}"


def test_a_name_with_a_comma_is_quoted_and_the_rule_stays_english() -> None:
    with pytest.raises(UsageError) as raised:
        LLM("demo", logits_processors="x,x")
    assert str(raised.value) == (
        "logits_processors (--logits-processors): expected one name without spaces or commas, "
        "got x,x"
    )


def test_a_template_that_writes_no_tools_is_named_with_its_setting() -> None:
    with (
        LLM("demo", chat_template=TEMPLATE, max_seq_len=256, num_pages=64) as llm,
        pytest.raises(HeadstockError) as raised,
    ):
        llm.chat([{"role": "user", "content": "hi"}], tools=[TOOL])
    assert "set chat_template (--chat-template) to one that does" in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_seq_len": 64}, "max_seq_len (--max-seq-len)"),
        ({"num_pages": 4}, "num_pages (--num-pages)"),
        ({"kv_memory_mb": 4}, "kv_memory_mb (--kv-memory-mb)"),
        ({"kv_context_len": 64}, "kv_context_len (--kv-context-len)"),
    ],
)
def test_a_prompt_that_is_too_long_names_the_setting_that_limits_it(
    settings: dict[str, int], named: str
) -> None:
    with LLM(
        "demo", **{"num_pages": 512 if "max_seq_len" in settings else None, **settings}
    ) as llm:
        longest = llm._session.engine.max_seq_len
        with pytest.raises(HeadstockError) as raised:
            llm.generate([[1] * 5000])
    text = str(raised.value)
    assert "5000" in text and str(longest) in text and named in text


def test_a_length_that_is_cut_is_logged_with_both_names(caplog: pytest.LogCaptureFixture) -> None:
    LLM("demo", num_pages=4, max_model_len=4096).close()
    (line,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "max_seq_len (--max-seq-len) is cut from 4096 to 64 tokens" in line


def test_a_note_on_an_alias_has_both_names_in_python_and_on_the_command_line() -> None:
    (note,) = resolve_keywords({"gpu_memory_utilization": 0.8}, {}).notes
    parser = FlagParser(prog="headstock run")
    add_engine_flags(parser)
    flags = parser.parse_args(["--gpu-memory-utilization", "0.8"])
    assert resolve_flags(flags, {}).notes == (note,)
    assert note.startswith(
        "gpu_memory_utilization (--gpu-memory-utilization) 0.8: taken as memory_ratio "
        "(--memory-ratio) 0.8,"
    )


def test_how_an_engine_was_started_changes_no_comparison() -> None:
    assert EngineConfig(max_seq_len=64) == make_engine_config(max_model_len=64)
    assert resolve("--max-seq-len", "64") == EngineConfig(max_seq_len=64)
