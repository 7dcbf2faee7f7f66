"""What `/tokenizer_info` says of tokenizers of all kinds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import CHECKPOINT

from headstock import ModelError
from headstock.text.tokenizer import NoTokenizer, open_tokenizer
from headstock_openai_server.convert.tokenizer_info import describe_tokenizer

MARK = {
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
    "__type": "AddedToken",
}
Describe = Callable[..., dict[str, Any]]


@pytest.fixture
def describe(tmp_path: Path) -> Describe:
    """Describes the demo's tokenizer with another tokenizer_config.json."""

    def describe(config: dict[str, Any] | None, template: str | None = None) -> dict[str, Any]:
        shutil.copy(CHECKPOINT / "tokenizer.json", tmp_path)
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return describe_tokenizer(open_tokenizer(tmp_path), template, tmp_path)

    return describe


def test_tokens_are_text_and_all_else_is_the_checkpoints(
    describe: Describe, tmp_path: Path
) -> None:
    end = {"content": "<|im_end|>", **MARK}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 10**30,
        "eos_token": end,
        "additional_special_tokens": [end],
        "added_tokens_decoder": {"2": end},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    info = describe(config)
    assert info == {
        **config,
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_end|>"],
        "added_tokens_decoder": {"2": "<|im_end|>"},
        "chat_template": "{{ messages }}",
        **dict.fromkeys(("bos_token", "pad_token", "unk_token")),
    }
    assert str(tmp_path) not in json.dumps(info)


def test_the_servers_own_template_is_shown_in_place_of_the_models(describe: Describe) -> None:
    assert describe({"chat_template": "{{ a }}"}, "{{ b }}")["chat_template"] == "{{ b }}"


def test_a_tokenizer_without_configuration_has_its_class_and_no_tokens(describe: Describe) -> None:
    assert describe(None) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")),
    }


def test_a_model_without_a_tokenizer_has_none_to_show(tmp_path: Path) -> None:
    none: Any = NoTokenizer("no tokenizer in model")
    with pytest.raises(ModelError, match="no tokenizer in"):
        describe_tokenizer(none, None, tmp_path)
