"""The text decoder of models that take more than text, such as images or sound.

transformers calls them `...ForConditionalGeneration`. Their config.json has the decoder's fields in
`text_config`, and their checkpoints keep its tensors beside those of other parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from attrs import evolve

from headstock.nn.config_fields import Json, quoted, read_flag, read_whole
from headstock.nn.decoder import decoder
from headstock.nn.parameters import LLAMA_NAMES, TensorNames
from headstock.nn.rope_config import drop_sections
from headstock.spi import Model, ModelConfig

_ConfigReader = Callable[[Json], ModelConfig]

_RENAMES = (
    # as transformers wrote them before 4.52, and still does
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    # as later releases hold them, and wrote them at times
    ("model.language_model.", "model."),
    # a model without its head
    ("language_model.", "model."),
)
"""What checkpoints call the tensors of a text decoder -> what the decoder alone calls them."""

TOWERS = (
    *(
        (f"{base}{name}.", "vision tower")
        for base in ("", "model.")
        for name in ("vision_tower", "visual", "multi_modal_projector")
    ),
)
"""Beginnings of names of parts beside the decoder -> what these are."""

_STANDS_FOR: Mapping[str, str] = {"image": "an image", "video": "a video", "audio": "sound"}

_OTHER_CONFIGS = ("vision_config", "audio_config")
"""The fields of config.json for other parts, where those of the decoder are not apart."""


def text_decoder(
    architecture: str,
    readers: Mapping[str, _ConfigReader],
    names: TensorNames = LLAMA_NAMES,
    *,
    placeholders: Mapping[str, int] = MappingProxyType({}),
    tied: bool = False,
    may_be_flat: bool = False,
    towers: tuple[tuple[str, str], ...] = TOWERS,
    renames: tuple[tuple[str, str], ...] = _RENAMES,
    draft_config: Callable[[Mapping[str, Any], ModelConfig], ModelConfig] | None = None,
) -> Model:
    """The family of an architecture that takes more than text, served for its text alone.

    readers: the `model_type` of `text_config` -> what reads that; the first where it has none
    names: what the decoder alone calls its tensors
    placeholders: "image", "video" or "audio" -> the token that stands for one by default
    tied: whether the embeddings are the output matrix by default
    may_be_flat: whether config.json may have the decoder's fields without a `text_config`
    towers, renames: as in `ParamSpec`
    draft_config: as in `Model`
    """
    read = partial(
        _read_config,
        architecture=architecture,
        readers=readers,
        placeholders=placeholders,
        tied=tied,
        may_be_flat=may_be_flat,
    )
    return decoder(read, evolve(names, towers=towers, renames=renames), draft_config)


def _read_config(
    hf: Json,
    *,
    architecture: str,
    readers: Mapping[str, _ConfigReader],
    placeholders: Mapping[str, int],
    tied: bool,
    may_be_flat: bool,
) -> ModelConfig:
    """The text decoder in a parsed config.json.   raises: ValueError"""
    is_flat = may_be_flat and hf.get("text_config") is None
    text = _list_decoder_fields(hf) if is_flat else hf.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(
            f"text_config: expected a table with the text decoder's fields, got {quoted(text)}"
        )
    first, *_ = readers
    model_type = first if is_flat else text.get("model_type", first)
    if not isinstance(model_type, str) or model_type not in readers:
        raise ValueError(
            f"text_config.model_type: expected {' or '.join(readers)} in {architecture}, got "
            f"{quoted(model_type)}"
        )
    title = "" if is_flat else "text_config."
    try:
        config = readers[model_type](_complete_text(hf, text, tied))
    except ValueError as error:
        raise ValueError(f"{title}{error}") from error
    return evolve(
        config,
        architecture=architecture,
        placeholders=tuple(_read_placeholders(hf, placeholders)),
        ignored_fields=tuple(f"{title}{name}" for name in config.ignored_fields),
    )


def _list_decoder_fields(hf: Json) -> Json:
    """The decoder's fields of a config.json that has them beside those of other parts."""
    return {name: value for name, value in hf.items() if name not in _OTHER_CONFIGS}


def _complete_text(hf: Json, text: Json, tied: bool) -> Json:
    """The fields of the decoder alone, with what counts for it of the whole config.json."""
    # The whole model ties its matrices, and its own field counts. The decoder's counts in older
    # files alone; a stored output matrix that differs is used in either case.
    is_tied = read_flag(hf, "tie_word_embeddings", tied, may_be_null=True) or read_flag(
        text, "tie_word_embeddings", False, may_be_null=True
    )
    dtypes = (source.get(name) for source in (hf, text) for name in ("dtype", "torch_dtype"))
    others = {
        name: value
        for name, value in drop_sections(text).items()
        # What reads the decoder alone knows it by another type.
        if name not in ("model_type", "architectures", "dtype", "torch_dtype")
    }
    # Without any, the decoder's own default counts.
    ends = [*_list_ends(text), *_list_ends(hf)]
    if ends:
        others["eos_token_id"] = ends
    return {
        **others,
        "dtype": next((dtype for dtype in dtypes if dtype), None),
        "tie_word_embeddings": is_tied,
    }


def _list_ends(hf: Json) -> list[object]:
    """What `eos_token_id` lists."""
    ends = hf.get("eos_token_id")
    return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]


def _read_placeholders(hf: Json, defaults: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Tokens that stand for other inputs, as config.json names them or by default.

    raises: ValueError
    """
    for kind, what in _STANDS_FOR.items():
        fields = (f"{kind}_token_id", f"{kind}_token_index")
        field = next((name for name in fields if hf.get(name) is not None), None)
        if field is not None:
            yield read_whole(hf, field), what
        elif kind in defaults:
            yield defaults[kind], what
