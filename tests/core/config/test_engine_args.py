"""`EngineArgs`: what scripts of vLLM do with it."""

from __future__ import annotations

import argparse

import pytest

import headstock
from headstock import LLM, EngineArgs, UsageError
from headstock.config import resolve_keywords


def parse(*words: str, **defaults: object) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    assert EngineArgs.add_cli_args(parser) is parser
    parser.add_argument_group("sampling").add_argument("--temperature", type=float)
    parser.set_defaults(**defaults)
    args = vars(parser.parse_args(words))
    args.pop("temperature")
    return args


def test_flags_become_keywords_that_an_llm_takes() -> None:
    found = parse("--max-model-len", "64", "--enforce-eager", "--no-kv-cache", model="demo")
    assert found == {
        "model": "demo",
        "max_seq_len": 64,
        "enforce_eager": True,
        "kv_cache": False,
    }
    config = resolve_keywords(found, {}).engine
    assert (config.model, config.max_seq_len, config.runner, config.kv_cache) == (
        "demo",
        64,
        "eager",
        False,
    )


def test_only_what_is_given_is_set_and_lists_add_up() -> None:
    assert parse() == {}
    assert parse("--overlap", "--opt", "sdpa.shared_prefix=on", "--opt", "a.b=1") == {
        "overlap": True,
        "opt": ["sdpa.shared_prefix=on", "a.b=1"],
    }


@pytest.mark.parametrize("words", [("--page-size", "x"), ("--tp", "-1"), ("--overlap", "maybe")])
def test_a_wrong_value_ends_with_the_flag(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert f"argument {words[0]}" in capsys.readouterr().err


def test_a_script_runs_with_them() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", default="x")
    EngineArgs.add_cli_args(parser).set_defaults(model="demo")
    args = EngineArgs.from_cli_args(parser.parse_args(["--num-pages", "64"]))
    assert repr(args) == "EngineArgs(model='demo', num_pages=64)"
    with LLM(**vars(args)) as llm:
        assert llm.generate("12 + 30 =")[0].outputs[0].text.startswith(" 42")
    with pytest.raises(UsageError, match="page_sise"):
        LLM(**vars(EngineArgs("demo", page_sise=4)))


@pytest.mark.parametrize("name", sorted(headstock.FOREIGN))
def test_names_of_other_engines_say_what_there_is_in_their_place(name: str) -> None:
    with pytest.raises(ImportError, match=f"headstock has no {name}; .*LLM|LoRA|EngineArgs"):
        exec(f"from headstock import {name}")
