"""Fields of config.json that a family must read but that do not affect scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstock.spi import Model


def change_field(hf: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
    """config.json with another value of a field, which may be the text decoder's."""
    text = hf.get("text_config")
    return {**hf, name: value} if text is None else {**hf, "text_config": {**text, name: value}}


def check_eos(family: Model, hf: Mapping[str, Any]) -> None:
    """A text ends at each of the tokens that config.json names."""
    for value, ids in ((7, (7,)), ([3, 9, 11], (3, 9, 11)), (0, (0,))):
        read = family.config(change_field(hf, "eos_token_id", value)).eos_ids
        assert set(read) == set(ids), (
            f"ModelConfig.eos_ids is {read} for an eos_token_id of {value}; expected {ids}"
        )


def check_sizes(family: Model, hf: Mapping[str, Any], *, may_rename: bool = False) -> None:
    """A prompt may have the length and the token ids that config.json allows.

    may_rename: the architecture may use other names for these, so that the sizes do not change
    """
    for name, attribute, sizes in (
        ("max_position_embeddings", "max_position", (64, 640, 4096)),
        ("vocab_size", "vocab", (96, 1000, 200_000)),
    ):
        read = {
            stated: getattr(family.config(change_field(hf, name, stated)), attribute)
            for stated in sizes
        }
        if may_rename and len(set(read.values())) == 1:
            continue
        for stated, size in read.items():
            assert size == stated, f"ModelConfig.{attribute} is {size} for {name} of {stated}"
