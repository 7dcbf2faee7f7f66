"""What a checkpoint's generation_config.json says: how to sample by default, and where to end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from headstock.errors import ModelError, RequestError, shorten
from headstock.sampling_checks import is_int
from headstock.sampling_params import SamplingParams

PARAM_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""transformers' names and ours."""


@frozen
class GenerationConfig:
    """The default parameters, and the ids that end a text; with none, those of config.json do.

    chat_params: those of chats, whose answers may fill the context unless the file says otherwise
    """

    params: SamplingParams
    chat_params: SamplingParams
    eos_ids: tuple[int, ...]


def read_generation_config(directory: Path) -> GenerationConfig:
    """What the file in `directory` says; a missing file says nothing.   raises: ModelError"""
    path = directory / "generation_config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        values = {}
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read {shorten(path)}: {shorten(error)}; correct or remove the file"
        ) from error
    if not isinstance(values, dict):
        raise ModelError(f"{shorten(path)} must hold one JSON object; correct or remove the file")
    try:
        params = parse_params(values)
        return GenerationConfig(
            params=params,
            chat_params=(
                params.replace({"max_tokens": None})
                if values.get("max_new_tokens") is None
                else params
            ),
            eos_ids=parse_eos_ids(values.get("eos_token_id")),
        )
    except RequestError as error:
        raise ModelError(f"{shorten(path)}: {error}; correct or remove the file") from error


def parse_params(values: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a parsed file. `do_sample: false` is greedy, whatever its temperature."""
    params = {
        ours: values[theirs]
        for theirs, ours in PARAM_NAMES.items()
        if values.get(theirs) is not None
    }
    if values.get("do_sample") is False:
        params["temperature"] = 0.0
    return SamplingParams().replace(params)


def parse_eos_ids(value: object) -> tuple[int, ...]:
    """One id, a list of them or None as a tuple.   raises: RequestError"""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not is_int(token, 0, (1 << 31) - 1):
            raise RequestError(
                f"eos_token_id: expected a token id or a list of them, got {shorten(token)}"
            )
    return tuple(ids)
