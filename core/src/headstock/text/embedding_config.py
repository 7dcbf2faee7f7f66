"""What a checkpoint's own files say of its vectors: sentence-transformers' modules.json, with the
config.json of its pooling, config_sentence_transformers.json, whose instructions have names, and
sentence_bert_config.json, which bounds texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

from headstock.errors import ModelError, RequestError, describe_type, shorten
from headstock.sampling_checks import MAX_TOKEN_ID, is_int

_SERVED: Final = {"lasttoken": "last", "mean": "mean"}
_MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_KNOWN: Final = ("Transformer", "Pooling", "Normalize")


@frozen(kw_only=True)
class EmbeddingConfig:
    """How vectors of a checkpoint are made where a request does not say.

    unserved: what its files ask for that is not served; empty if all is
    instructions: what comes before a text, by the name of the kind of text
    default_name: of the instruction that texts have without a name
    max_tokens: the most that a text may have, its instruction among them; None for no bound
    lowercase: whether texts become small letters
    """

    pooling: str = "last"
    normalize: bool = True
    unserved: str = ""
    instructions: Mapping[str, str] = MappingProxyType({})
    default_name: str | None = None
    max_tokens: int | None = None
    lowercase: bool = False

    def check_length(self, count: int) -> None:
        """Raise RequestError for a prompt of more tokens than the files have vectors for."""
        if self.max_tokens is not None and count > self.max_tokens:
            raise RequestError(
                f"prompt has {count} tokens, and max_seq_length of sentence_bert_config.json is "
                f"{self.max_tokens}; shorten it",
                "prompt",
            )

    def find_pooling(self, asked: str | None) -> str:
        """The way to pool.   raises: RequestError where the files ask for another one"""
        if asked is not None:
            return asked
        if self.unserved:
            raise RequestError(
                f"pooling: expected last or mean, because modules.json asks for {self.unserved}, "
                "which is not supported",
                "pooling",
            )
        return self.pooling

    def find_instruction(self, name: str | None) -> str:
        """What comes before a text.   raises: RequestError for a name that is not known"""
        if name is None:
            return self.instructions.get(self.default_name or "", "")
        if not self.instructions:
            raise RequestError(
                "prompt_name is not supported: the checkpoint names no instruction; leave it out",
                "prompt_name",
            )
        if not isinstance(name, str) or name not in self.instructions:
            known = ", ".join(map(shorten, self.instructions))
            raise RequestError(
                f"prompt_name: expected one of {known}, got {shorten(name)}", "prompt_name"
            )
        return self.instructions[name]


def read_embedding_config(directory: Path) -> EmbeddingConfig:
    """What the files in `directory` say; missing ones say nothing.   raises: ModelError"""
    modules = read_json(directory / "modules.json", list)
    named = read_json(directory / "config_sentence_transformers.json", dict) or {}
    instructions = named.get("prompts") or {}
    if not isinstance(instructions, dict) or not all(
        isinstance(text, str) for text in instructions.values()
    ):
        raise ModelError(
            f"config_sentence_transformers.json in {shorten(directory)}: prompts: expected texts "
            f"by name, got {shorten(instructions)}; correct or remove the file"
        )
    name = named.get("default_prompt_name")
    default_name = name if isinstance(name, str) else None
    texts = MappingProxyType(dict(instructions))
    max_tokens, lowercase = _read_texts(directory)
    if modules is None:
        return EmbeddingConfig(
            instructions=texts,
            default_name=default_name,
            max_tokens=max_tokens,
            lowercase=lowercase,
        )
    kinds = [name_kind(module) for module in modules]
    pooling, unserved = "last", ""
    for kind, module in zip(kinds, modules, strict=True):
        if kind == "Pooling":
            found = read_json(directory / str(module.get("path", "")) / "config.json", dict) or {}
            pooling, unserved = _find_mode(found)
        elif kind not in _KNOWN:
            unserved = unserved or f"a module {shorten(kind)}"
    return EmbeddingConfig(
        pooling=pooling,
        normalize="Normalize" in kinds,
        unserved=unserved,
        instructions=texts,
        default_name=default_name,
        max_tokens=max_tokens,
        lowercase=lowercase,
    )


def _read_texts(directory: Path) -> tuple[int | None, bool]:
    """The most tokens of a text, and whether it becomes small letters.   raises: ModelError"""
    name = "sentence_bert_config.json"
    found = read_json(directory / name, dict) or {}
    most, lowercase = found.get("max_seq_length"), found.get("do_lower_case") or False
    if most is not None and not is_int(most, 1, MAX_TOKEN_ID):
        raise ModelError(
            f"{name} in {shorten(directory)}: max_seq_length: expected 1 or more, or null, got "
            f"{shorten(most)}; correct the file"
        )
    if not isinstance(lowercase, bool):
        raise ModelError(
            f"{name} in {shorten(directory)}: do_lower_case: expected true or false, got "
            f"{shorten(lowercase)}; correct the file"
        )
    return most, lowercase


def name_kind(module: object) -> str:
    """The class of a module, without its package."""
    kind = module.get("type") if isinstance(module, dict) else None
    return str(kind).rpartition(".")[2]


def _find_mode(found: Mapping[str, Any]) -> tuple[str, str]:
    """How a pooling's config.json has vectors pooled, and what of it is not served."""
    modes = [mode for key, mode in _MODES.items() if found.get(key)]
    # Later releases have one key, with a name or several.
    mode = found.get("pooling_mode")
    modes += [mode] if isinstance(mode, str) else list(mode or ())
    if len(modes) != 1 or modes[0] not in _SERVED:
        return "last", f"pooling by {shorten(' and '.join(map(str, modes)) or 'nothing')}"
    if modes[0] == "mean" and found.get("include_prompt") is False:
        return "mean", "the mean of a text without its instruction"
    return _SERVED[modes[0]], ""


def read_json(path: Path, kind: type) -> Any:
    """The content of a file, of this type; None if there is none.   raises: ModelError"""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {path.name} in {shorten(path.parent)}: {shorten(error)}; correct or "
            "remove the file"
        ) from error
    if not isinstance(content, kind):
        what = "object" if kind is dict else "array"
        raise ModelError(
            f"{path.name} in {shorten(path.parent)}: expected one JSON {what}, got "
            f"{describe_type(content)}; correct or remove the file"
        )
    return content
