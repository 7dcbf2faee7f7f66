"""What a checkpoint's own files say of scores of documents: sentence-transformers' modules.json,
with the config.json of its LogitScore, and sentence_bert_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from attrs import frozen

from headstock.errors import ModelError, shorten
from headstock.sampling_checks import MAX_TOKEN_ID, is_int
from headstock.text.embedding_config import name_kind, read_json


@frozen(kw_only=True)
class ScoringConfig:
    """How documents are scored against queries, as far as a checkpoint's files say.

    method: "tokens": the probability of one next token against that of another; "cosine": of their
        vectors; "" where the files say nothing
    true_id, false_id: the token that stands for a document which answers the query, and the other
    unserved: what the files ask for that is not served; empty if all is
    template_name: of the chat template for pairs, where there are several
    add_generation_prompt, template_variables: what that template sees
    """

    method: Literal["tokens", "cosine", ""] = ""
    true_id: int = 0
    false_id: int = 0
    unserved: str = ""
    template_name: str | None = None
    add_generation_prompt: bool = False
    template_variables: Mapping[str, Any] = MappingProxyType({})


def read_scoring_config(directory: Path) -> ScoringConfig:
    """What the files in `directory` say; missing ones say nothing.   raises: ModelError"""
    kinds = {
        name_kind(module): module for module in read_json(directory / "modules.json", list) or ()
    }
    if "LogitScore" in kinds:
        return _read_logit_score(directory, str(kinds["LogitScore"].get("path", "")))
    return ScoringConfig(method="cosine" if "Pooling" in kinds else "")


def _read_logit_score(directory: Path, path: str) -> ScoringConfig:
    """The tokens of a LogitScore at `path`, and how its prompts are rendered.

    raises: ModelError
    """
    found = read_json(directory / path / "config.json", dict) or {}
    true_id, false_id = found.get("true_token_id"), found.get("false_token_id")
    where = f"{shorten(path)}/config.json in {shorten(directory)}"
    for name, token in (("true_token_id", true_id), ("false_token_id", false_id or 0)):
        if not is_int(token, 0, MAX_TOKEN_ID):
            raise ModelError(
                f"{where}: {name}: expected a token id, got {shorten(token)}; correct the file"
            )
    if true_id == false_id:
        raise ModelError(
            f"{where}: false_token_id: expected another token than true_token_id ({true_id}); "
            "correct the file"
        )
    bert = read_json(directory / "sentence_bert_config.json", dict) or {}
    options = _get_mapping(_get_mapping(bert, "processing_kwargs"), "chat_template")
    name = options.pop("chat_template", None)
    return ScoringConfig(
        method="tokens",
        true_id=int(true_id or 0),
        false_id=int(false_id or 0),
        unserved="the logit of one token alone" if false_id is None else "",
        template_name=name if isinstance(name, str) else None,
        add_generation_prompt=bool(options.pop("add_generation_prompt", False)),
        template_variables=MappingProxyType(options),
    )


def _get_mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy of the mapping at `key`; empty without one."""
    value = values.get(key)
    return dict(value) if isinstance(value, dict) else {}
