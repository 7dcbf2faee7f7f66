"""A tokenizer.json read without transformers, whose import takes half a second and more.

transformers adds what tokenizer_config.json and older files say to what tokenizer.json has. A
checkpoint is read here only where all of that is in tokenizer.json already, so that ids and texts
are those of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen
from tokenizers import AddedToken, Tokenizer

_NAMED_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)

_CHANGING_FIELDS = (
    *("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "gguf_file", "init_inputs"),
    *("post_processor", "split_special_tokens", "tokenizer_object"),
)
"""Fields of tokenizer_config.json by which transformers reads other files or alters the tokenizer.
"""

_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Files that transformers reads where tokenizer_config.json has no `added_tokens_decoder`."""

_MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
"""Model types whose large vocabularies transformers looks at, and warns of."""

_LARGE_VOCABULARY = 100_000


@frozen(eq=False)
class PlainTokenizer:
    """A tokenizer as its tokenizer.json has it, and the id of the token that ends texts."""

    backend: Tokenizer
    eos_id: int | None


def read_plain_tokenizer(directory: Path) -> PlainTokenizer | None:
    """The tokenizer of `directory`; None where transformers would alter it, or refuse it."""
    try:
        config = _read_config(directory)
        if config is None:
            return None
        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
        if not _has_all_tokens(backend, config, directory):
            return None
        if _is_warned_of(backend, directory):
            return None
        eos = _read_token(config.get("eos_token"))
        return PlainTokenizer(backend, None if eos is None else backend.token_to_id(eos))
    # Of damaged files the errors of transformers are those that users know. tokenizers raises plain
    # Exceptions.
    except Exception:
        return None


def _read_config(directory: Path) -> dict[str, Any] | None:
    """What tokenizer_config.json says; None for one that needs transformers.

    raises: OSError, ValueError
    """
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(config, dict) or any(config.get(name) for name in _CHANGING_FIELDS):
        return None
    if "added_tokens_decoder" not in config and any(
        (directory / name).exists() for name in _LEGACY_FILES
    ):
        return None
    return config


def _has_all_tokens(backend: Tokenizer, config: Mapping[str, Any], directory: Path) -> bool:
    """Whether all tokens of tokenizer_config.json are added ones in tokenizer.json already.

    raises: TypeError for a token of a wrong form
    """
    added = backend.get_added_tokens_decoder().values()
    # As transformers compares them: with their options.
    listed = {repr(token) for token in added}
    for entry in (config.get("added_tokens_decoder") or {}).values():
        if repr(AddedToken(**entry)) not in listed:
            return False
    # Those that are not special transformers may make so.
    texts = {token.content for token in added if token.special}
    return texts.issuperset(_list_named_tokens(backend, config))


def _list_named_tokens(backend: Tokenizer, config: Mapping[str, Any]) -> Iterator[str]:
    """The tokens that transformers adds to a tokenizer that lacks them.

    raises: TypeError for one of a wrong form
    """
    padding: Mapping[str, Any] | None = backend.padding
    if padding is not None and "pad_token" not in config:
        yield padding["pad_token"]
    for name, value in config.items():
        # Other names with this ending are switches: add_bos_token.
        is_token = isinstance(value, str | dict) and name.endswith("_token")
        if name in _NAMED_TOKENS or is_token:
            token = _read_token(value)
            if token is not None:
                yield token
    for name in ("extra_special_tokens", "additional_special_tokens"):
        value = config.get(name) or ()
        for each in value.values() if isinstance(value, dict) else value:
            token = _read_token(each)
            if token is not None:
                yield token


def _read_token(value: object) -> str | None:
    """The text of a token, which may be written with its options; None for none.

    raises: TypeError for another form
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return str(value["content"])
    raise TypeError(f"no token: {value!r}")


def _is_warned_of(backend: Tokenizer, directory: Path) -> bool:
    """Whether transformers may warn of the tokenizer, which is of a kind that had a fault.

    raises: OSError, ValueError
    """
    path = directory / "config.json"
    if backend.get_vocab_size() <= _LARGE_VOCABULARY or not path.exists():
        return False
    model_type = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    return model_type is None or model_type in _MISTRAL_TYPES
