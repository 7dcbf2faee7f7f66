"""What a GGUF file says of how texts are made, in the words of a generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstock.weights.gguf.metadata import Metadata

_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

_SAMPLING: Mapping[str, str] = {
    "temp": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def translate_generation(metadata: Metadata) -> dict[str, Any]:
    """The fields of a generation_config.json.   raises: HeaderError"""
    found: dict[str, Any] = {
        ours: metadata.find_number(f"general.sampling.{theirs}")
        for theirs, ours in _SAMPLING.items()
    }
    found["top_k"] = metadata.find_count("general.sampling.top_k")
    ends = [metadata.find_count(f"tokenizer.ggml.{key}") for key in _ENDS]
    found["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None)) or None
    return {name: value for name, value in found.items() if value is not None}
