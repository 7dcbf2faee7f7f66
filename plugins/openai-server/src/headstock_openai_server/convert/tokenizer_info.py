"""The tokenizer's configuration, for clients that render chats and find ends of text themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstock.errors import UsageError
from headstock.text import Tokenizer, find_template

FAST_CLASS = "PreTrainedTokenizerFast"
"""The class that reads any tokenizer.json in every version of transformers."""
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def describe_tokenizer(
    tokenizer: Tokenizer, template: str | None, directory: Path
) -> dict[str, Any]:
    """The checkpoint's tokenizer_config.json with tokens as text, and the chat template in use:
    `template`, or else the model's own.

    raises: ModelError without a tokenizer
    """
    hf_tokenizer = tokenizer.hf_tokenizer
    # From the file: transformers adds paths of this machine to its own version.
    config = read_config(directory)
    config.setdefault("tokenizer_class", FAST_CLASS)
    config |= {name: getattr(hf_tokenizer, name) for name in TOKENS}
    config.pop("chat_template", None)
    try:
        config["chat_template"] = find_template(tokenizer, template)
    except UsageError:
        return config  # a text-only model
    return config


def read_config(directory: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, with tokens as text; empty if it cannot be read."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return _spell_tokens(config) if isinstance(config, dict) else {}


def _spell_tokens(value: Any) -> Any:
    """The value, with each token and its options replaced by the token's text."""
    if isinstance(value, list):
        return [_spell_tokens(each) for each in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("content"), str):
        return value["content"]
    return {name: _spell_tokens(each) for name, each in value.items()}
