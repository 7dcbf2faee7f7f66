"""Flags, environment variables, file keys and Python keywords are the same settings."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import pytest
import yaml

from headstock.config import (
    EngineConfig,
    FlagParser,
    add_engine_flags,
    add_sampling_flags,
    make_engine_config,
    resolve_flags,
    resolve_keywords,
)
from headstock.config.catalog import engine_settings, sampling_settings, setting_names
from headstock.config.engine import SETTINGS
from headstock.config.flags import DEST_PREFIX
from headstock.errors import UsageError
from headstock.sampling_params import SamplingParams
from headstock.text.generation_config import PARAM_NAMES

OTHER_VALUES: dict[str, object] = {
    "model": "elsewhere",
    "revision": "v1.0",
    "model_family": "my-families",
    "model_impl": "native",
    "dtype": "bfloat16",
    "device": "cpu",
    "load_format": "dummy",
    "quant": "int8",
    "chat_template": "chat.jinja",
    "tool_parser": "hermes",
    "reasoning_parser": "think",
    "scoring": "cosine",
    "max_seq_len": 77,
    "max_seq_len_or_less": True,
    "attn": "fa,fi",
    "cache_type": "naive",
    "scheduler": "prefill-first",
    "runner": "eager",
    "ops": "torch",
    "tuned_choices": "/tmp/kept",
    "proposer": "draft",
    "draft_model": "some/small",
    "logits_processors": ("one", "two"),
    "grammar": "off",
    "grammar_timeout": 2.5,
    "open_objects": True,
    "executor": "multiprocess",
    "opt": ("fa.x=1", "fa.y=2"),
    "page_size": 8,
    "page_size_or_less": True,
    "num_pages": 9,
    "memory_ratio": 0.5,
    "kv_memory_mb": 10,
    "kv_context_len": 11,
    "memory_profiles": "/tmp/kept",
    "kv_dtype": "fp8_e4m3",
    "paged_attn": "off",
    "prefix_cache_n": 0,
    "snapshot_tokens": 512,
    "snapshot_ratio": 0.5,
    "kv_cache": False,
    "max_batch_tokens": 4096,
    "max_itl_ms": 12.5,
    "max_running_requests": 12,
    "max_queued_requests": 13,
    "on_pressure": "reject",
    "memory_threshold": 0.25,
    "cuda_graph_max_bs": 0,
    "cuda_graph_max_tokens": 512,
    "defer_graphs": False,
    "overlap": False,
    "late_planning": False,
    "tp": 2,
    "ep": True,
    "engine_seed": 14,
    "debug_invariants": True,
    "debug_attention": True,
    "debug_ops": True,
    "debug_canary": True,
    "record": "steps.recording",
    "record_overwrite": True,
    "record_prompts": True,
    "log_level": "DEBUG",
}


OTHER_SAMPLING: dict[str, tuple[object, list[str]]] = {
    "n": (3, ["3"]),
    "temperature": (0.5, ["0.5"]),
    "top_p": (0.25, ["0.25"]),
    "top_k": (-1, ["-1"]),
    "min_p": (0.125, ["0.125"]),
    "presence_penalty": (-1.5, ["-1.5"]),
    "frequency_penalty": (2.0, ["2"]),
    "repetition_penalty": (1.25, ["1.25"]),
    "seed": (-7, ["-7"]),
    "stop": (("a b", "c,"), ["a b", "c,"]),
    "stop_token_ids": ((1, 22), ["1,22"]),
    "ignore_eos": (True, ["on"]),
    "max_tokens": (9, ["9"]),
    "min_tokens": (8, ["8"]),
    "logprobs": (0, ["0"]),
    "prompt_logprobs": (20, ["20"]),
    "skip_special_tokens": (False, ["off"]),
    "include_stop_str_in_output": (True, ["on"]),
    "logit_bias": ({5: -100.0, 7: 1.5}, ["5=-100", "7=1.5"]),
    "allowed_token_ids": ((3, 4, 5), ["3 4", "5"]),
    "user": ("ada", ["ada"]),
    "extra_args": ({"a": [1, {"b": None}]}, ['{"a": [1, {"b": null}]}']),
    "structured_outputs": (
        {"choice": ("yes", "no")},
        ['{"choice": ["yes", "no"]}'],
    ),
}
"""Field of SamplingParams -> another value than its default, and the texts of its flag."""


def parser() -> FlagParser:
    """All flags."""
    flag_parser = FlagParser(prog="headstock run")
    add_engine_flags(flag_parser)
    add_sampling_flags(flag_parser)
    return flag_parser


@pytest.mark.feature("T22")
def test_each_field_has_a_value_here_that_is_not_its_default() -> None:
    assert list(OTHER_VALUES) == list(engine_settings())
    defaults = EngineConfig()
    for key, setting in engine_settings().items():
        assert OTHER_VALUES[key] != getattr(defaults, setting.name)


@pytest.mark.feature("T22")
@pytest.mark.parametrize("key", OTHER_VALUES)
def test_one_setting_by_flag_environment_file_and_keyword(key: str, tmp_path: Path) -> None:
    setting, value = engine_settings()[key], OTHER_VALUES[key]
    texts = value if isinstance(value, tuple) else (setting.value_type.show(value),)  # type: ignore[arg-type]
    expected = EngineConfig(**{setting.name: value})
    for flag in (setting.flag, *setting.aliases):
        line = [word for text in texts for word in (flag, str(text))]
        assert resolve_flags(parser().parse_args(line), {}).engine == expected
    by_variable = {f"HEADSTOCK_{key.upper()}": " ".join(map(str, texts))}
    assert resolve_flags(parser().parse_args([]), by_variable).engine == expected
    (tmp_path / "a.json").write_text(json.dumps({key: value}), encoding="utf-8")
    assert (
        resolve_flags(parser().parse_args(["--config", str(tmp_path / "a.json")]), {}).engine
        == expected
    )
    for word in {
        setting.name,
        key,
        *(flag[2:].replace("-", "_") for flag in setting.aliases if flag != "-m"),
    }:
        assert resolve_keywords({word: value}, {}).engine == expected


@pytest.mark.feature("T22")
def test_each_sampling_parameter_has_a_value_here_that_is_not_its_default() -> None:
    assert list(OTHER_SAMPLING) == [field.name for field in attrs.fields(SamplingParams)]
    for name, (value, _) in OTHER_SAMPLING.items():
        assert value != getattr(SamplingParams(), name)


@pytest.mark.feature("T22")
@pytest.mark.parametrize("name", OTHER_SAMPLING)
def test_one_sampling_parameter_by_flag_environment_and_file(name: str, tmp_path: Path) -> None:
    setting, (value, texts) = sampling_settings()[name], OTHER_SAMPLING[name]
    expected = SamplingParams(**{name: value})  # type: ignore[arg-type]
    for flag in (setting.flag, *setting.aliases):
        line = [word for text in texts for word in (flag, text)]
        assert (
            SamplingParams().replace(resolve_flags(parser().parse_args(line), {}).sampling)
            == expected
        )
    if setting.negative is not None:
        word = setting.flag if value else setting.negative
        assert resolve_flags(parser().parse_args([word]), {}).sampling == {name: value}
    variables = {
        f"HEADSTOCK_{name.upper()}": setting.value_type.show(setting.value_type.read(value))
    }
    if name != "stop":  # a variable holds one stop string, spaces and all
        assert resolve_flags(parser().parse_args([]), variables).sampling == {name: value}
    (tmp_path / "a.json").write_text(json.dumps({name: value}), encoding="utf-8")
    (tmp_path / "a.yaml").write_text(
        yaml.safe_dump({name: list(value) if isinstance(value, tuple) else value})
    )
    for file in ("a.json", "a.yaml"):
        assert resolve_flags(
            parser().parse_args(["--config", str(tmp_path / file)]), {}
        ).sampling == {name: value}


@pytest.mark.feature("T22")
def test_the_defaults_of_sampling_say_when_they_are_the_models() -> None:
    unset = {
        name
        for name, setting in sampling_settings().items()
        if "the model's" in setting.default_text
    }
    assert unset == set(PARAM_NAMES.values())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-n 0", "n (-n): expected 1 or more, got 0"),
        ("--n 129", "n (--n): expected 128 or less, got 129"),
        (
            "--frequency-penalty 2.1",
            "frequency_penalty (--frequency-penalty): expected a number between -2 and 2, got 2.1",
        ),
        ("--logprobs 21", "logprobs (--logprobs): expected 20 or less, got 21"),
        (
            "--stop-token-ids 1,x",
            "stop_token_ids (--stop-token-ids): expected token ids of 0 to 2147483647, got x",
        ),
        (
            "--stop-token-ids -1",
            "stop_token_ids (--stop-token-ids): expected token ids of 0 to 2147483647, got -1",
        ),
        ("--logit-bias 5", "logit_bias (--logit-bias): expected ID=BIAS, got 5"),
        (
            "--logit-bias 5=x",
            "logit_bias (--logit-bias): expected numbers between -100 and 100, got x",
        ),
        (
            "--logit-bias 5=nan",
            "logit_bias (--logit-bias): expected numbers between -100 and 100, got nan",
        ),
        (
            "--logit-bias x=5",
            "logit_bias (--logit-bias): expected token ids of 0 to 2147483647 as keys, got x",
        ),
        (
            "--allowed-token-ids ,",
            "allowed_token_ids (--allowed-token-ids): expected 1 to 262144 token ids, got 0",
        ),
        (
            "--ignore-eos maybe",
            "expected one of on, off, 1, 0, true, false, got maybe",
        ),
        (
            "--no-skip-special-token",
            "unknown flag --no-skip-special-token; did you mean --no-skip-special-tokens?",
        ),
    ],
)
def test_a_sampling_flag_out_of_range_says_its_rule(line: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        resolve_flags(parser().parse_args(line.split()), {})
    assert str(raised.value).endswith(message)


@pytest.mark.feature("T22")
def test_the_flags_are_the_fields() -> None:
    dests = {action.dest for action in parser()._actions if action.dest.startswith(DEST_PREFIX)}
    fields = {*engine_settings(), *sampling_settings(), "config", "preset"}
    assert dests == {DEST_PREFIX + key for key in fields}
    names_of_fields = [
        field.name for field in attrs.fields(EngineConfig) if "flag" in field.metadata
    ]
    assert [setting.name for setting in engine_settings().values()] == names_of_fields
    assert {s.name: s.key for s in engine_settings().values() if s.name != s.key} == {
        "seed": "engine_seed"
    }
    assert [field.name for field in attrs.fields(SamplingParams)] == list(sampling_settings())


@pytest.mark.feature("T22")
def test_no_name_means_two_settings() -> None:
    flags = [
        flag
        for setting in (*engine_settings().values(), *sampling_settings().values())
        for flag in (setting.flag, *setting.aliases)
    ]
    assert len(flags) == len(set(flags))
    for word, name in setting_names().items():
        assert word == word.lower(), word
        assert name.setting.key in {*engine_settings(), *sampling_settings(), "config", "preset"}


@pytest.mark.feature("T22")
def test_the_text_of_every_value_reads_back() -> None:
    for config in (
        EngineConfig(),
        *(EngineConfig(**{engine_settings()[k].name: v}) for k, v in OTHER_VALUES.items()),
    ):
        for field, setting in SETTINGS.items():
            value = getattr(config, field)
            assert setting.value_type.read(value) == value
            assert setting.value_type.read(setting.value_type.show(value)) == value


def test_what_is_said_of_flags_is_logged_of_keywords(caplog: pytest.LogCaptureFixture) -> None:
    assert make_engine_config(gpu_memory_utilization=0.5).memory_ratio == 0.5
    assert "0.5: taken as memory_ratio (--memory-ratio) 0.5" in caplog.text
    caplog.clear()
    make_engine_config(tp=2)
    assert caplog.text == ""


def test_keywords_of_python() -> None:
    assert resolve_keywords({"preset": "debug"}, {}).engine.runner == "eager"
    assert resolve_keywords({"no_overlap": True}, {}).engine.overlap is False
    assert resolve_keywords({}, {"HEADSTOCK_TP": "3"}).engine.tp == 3
    resolved = resolve_keywords({"tp": 2}, {"HEADSTOCK_TP": "3"})
    assert (resolved.engine.tp, resolved.origins["tp"]) == (2, "keyword tp")
    assert make_engine_config(model=Path("some") / "where").model == "some/where"
    for keywords, message in [
        ({"page_sise": 4}, "page_sise=4: unknown setting 'page_sise'; did you mean page_size?"),
        ({"temperature": 1}, "temperature: a sampling value"),
        ({"tp": 1, "tp_size": 1}, "tp_size (--tp-size) 1 set the same value"),
        ({"tp": 0}, "tp (--tp): expected 1 or more, got 0"),
    ]:
        with pytest.raises(UsageError, match=re.escape(message)):
            make_engine_config(**keywords)


@pytest.mark.parametrize("server", [False, True], ids=["run", "serve"])
def test_the_help_names_each_setting_and_no_other_engines_flag(server: bool) -> None:
    flag_parser = FlagParser(prog="headstock")
    add_engine_flags(flag_parser, server=server)
    add_sampling_flags(flag_parser)
    text = flag_parser.format_help()
    for setting in (*engine_settings().values(), *sampling_settings().values()):
        is_listed = re.search(rf"^  {setting.flag}[ ,\n]", text, re.MULTILINE) is not None
        match setting.listed:
            case "always":
                assert is_listed, setting.flag
            case "server":
                assert is_listed is server, setting.flag
            case "never":
                assert not is_listed and f"with {setting.flag}," in " ".join(text.split())
        for alias in setting.aliases:
            is_named = re.search(rf"(?<![\w-]){alias}(?![\w-])", text) is not None
            assert is_named is not alias.startswith("--"), alias
