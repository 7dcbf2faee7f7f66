"""Texts name settings by the flags of the command line, and by keywords in Python."""

from __future__ import annotations

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
)
from headstock.config.catalog import engine_settings, keyword_names
from headstock.config.setting import Setting
from headstock.config.value_types import Choice, Integer, Number, Switch, Text, Texts
from headstock.errors import HeadstockError, UsageError, shorten


def bad(setting: Setting) -> str | None:
    """A value that breaks the setting's rule; None where every text is a value."""
    match setting.value_type:
        case Choice() | Switch() | Integer() | Number() | Texts():
            return "surely,wrong"
        case Text(word=word, pattern=pattern) if word is None and not re.fullmatch(pattern, "a b"):
            return "a b"
        case _:
            return None


@pytest.mark.parametrize("key", list(engine_settings()))
def test_every_setting_is_named_as_it_was_given(key: str) -> None:
    setting = engine_settings()[key]
    parser = FlagParser(prog="headstock run")
    add_engine_flags(parser)
    value = bad(setting)
    if value is None:
        value = ""
    for flag in (setting.flag, *setting.aliases):
        with pytest.raises(UsageError) as raised:
            resolve_flags(parser.parse_args([f"{flag}={value}"]), {})
        assert str(raised.value).startswith(f"{flag} ")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else key
        assert f": {name} must" in str(raised.value)
    for word in [word for word, name in keyword_names().items() if name.setting.key == key]:
        with pytest.raises(UsageError) as raised:
            make_engine_config(**{word: value})
        assert str(raised.value).startswith(
            f"{word}={shorten(value)}: {word} must"
        ) and "--" not in str(raised.value)
    with pytest.raises(UsageError) as raised:
        EngineConfig(**{setting.name: value})
    assert str(raised.value).startswith(f"{setting.name}=") and "--" not in str(raised.value)


def test_a_chat_template_that_cannot_be_read_is_named_by_its_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "-p", "a", "--quiet", "--chat-template", "nofile.jinja"]) == 6
    assert capsys.readouterr().err.startswith(
        "headstock: --chat-template nofile.jinja: cannot be read"
    )


ERRORS = [
    (
        {"max_model_len": 100_000},
        "max_model_len=100000: the model's own limit is 4096 tokens; lower it, leave it out, or "
        "have it cut by max_seq_len_or_less=True",
    ),
    (
        {"block_size": 64, "max_seq_len": 3},
        "max_seq_len=3: max_seq_len must be at least page_size (64)",
    ),
    ({"runner": "cudagraph"}, 'runner="cudagraph" cannot run on cpu; use runner="eager"'),
    ({"ops": "triton"}, 'ops="triton" cannot run on cpu; use ops="torch"'),
    ({"tp_size": 2}, "tp_size=2: this version runs on one device; use tp_size=1"),
    (
        {"num_pages": 8, "kv_memory_mb": 3},
        (
            "num_pages=8 and kv_memory_mb=3: give at most one of num_pages, memory_ratio, "
            "kv_memory_mb, kv_context_len"
        ),
    ),
    (
        {"attention_backend": "fa"},
        'attention_backend="fa" cannot serve decode/extend/prefill here: ',
    ),
    (
        {"max_batch_tokens": 7, "max_num_seqs": 8},
        "max_batch_tokens=7: max_batch_tokens must be at least ",
    ),
]


@pytest.mark.parametrize(("settings", "message"), ERRORS, ids=str)
def test_python_names_keywords_and_the_command_line_flags(
    settings: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(HeadstockError) as raised:
        LLM(device="cpu", **settings)  # type: ignore[arg-type]
    text = str(raised.value)
    assert text.startswith(message) and not re.search(r"(?<![\w-])--[a-z]", text)

    flags = [f"--{word.replace('_', '-')}={value}" for word, value in settings.items()]
    assert main(["run", "--prompt", "x", "--device", "cpu", *flags]) == type(raised.value).exit_code
    line = capsys.readouterr().err.splitlines()[-1]
    first = message.split()[0].split("=")[0].rstrip(":").replace("_", "-")
    assert line.startswith(f"headstock: --{first}")
    assert not re.search(r"\b[a-z]+_[a-z_]+=", line)


@pytest.mark.parametrize(
    ("settings", "length_hint"),
    [
        ({"num_pages": 512}, ": the model itself allows no more"),
        (
            {"num_pages": 512, "max_model_len": 64},
            " or raise max_model_len, which the model allows up to 4096",
        ),
        ({"num_pages": 4}, " or enlarge the KV pool with num_pages"),
        ({"kv_memory_mb": 4}, " or enlarge the KV pool with kv_memory_mb"),
        ({"kv_context_len": 64}, " or enlarge the KV pool with kv_context_len"),
    ],
)
def test_a_prompt_that_is_too_long_is_told_what_limits_it(
    settings: dict[str, int], length_hint: str
) -> None:
    with LLM("demo", **settings) as llm:
        longest = llm._session.engine.max_seq_len
        with pytest.raises(HeadstockError) as raised:
            llm.generate([[1] * 5000])
    message = (
        f"prompt has 5000 tokens, but sequences may have {longest} here, at least one of them "
        "output"
    )
    assert str(raised.value) == f"{message}; shorten the prompt{length_hint}"


def test_a_length_that_is_cut_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    LLM("demo", num_pages=4, max_model_len=4096).close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "max_model_len is cut from 4096 to 64 tokens, all that the KV pool can hold" in line


def test_sentences_and_other_flags_stay_whole() -> None:
    spell = EngineConfig().spell
    assert spell("raise --max-seq-len or --num-pages 7.") == "raise max_seq_len or num_pages=7."
    assert spell("use --no-kv-cache, --debug-canary") == "use kv_cache=False, debug_canary=True"
    assert (
        spell("(--attn fi,trtllm), --prompt x, --engine-seed 3")
        == '(attn="fi,trtllm"), --prompt x, seed=3'
    )
    assert EngineConfig(max_seq_len=64) == make_engine_config(max_model_len=64)
