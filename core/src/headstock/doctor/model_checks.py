"""Checks of the files of a model: weights that fit it, and a tokenizer that gives text back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headstock.doctor.finding import Finding, fail_finding, pass_finding, warn_finding
from headstock.errors import format_count, shorten

if TYPE_CHECKING:
    from headstock.startup.model_loading import FamilyAndConfig

_SAMPLE_TEXT = "Once upon a time"


def check_weights(directory: Path, model: FamilyAndConfig | None) -> Iterator[Finding]:
    """Check that the headers of the weights agree with their files, and with the model if known."""
    from headstock.startup.model_loading import replace_missing_head
    from headstock.weights import check_headers

    specs, no_text = None, ""
    if model is not None:
        config, no_text = replace_missing_head(directory, model.family, model.config)
        specs = model.family.params(config)
    tensors, files, size = check_headers(directory, specs)
    if no_text:
        yield warn_finding("weights", f"vectors are served, and no text: {no_text}", "")
    yield pass_finding(
        "weights",
        (
            f"{format_count(tensors, 'tensor')} in {format_count(files, 'file')}, "
            f"{size / 2**20:.1f} MiB"
        ),
    )


def check_tokenizer(directory: Path, model: FamilyAndConfig | None) -> Iterator[Finding]:
    """Check that the tokenizer gives a text back and makes no tokens that the model lacks."""
    from headstock.text.tokenizer import Tokenizer

    loaded = Tokenizer(directory)
    _ = loaded.hf_tokenizer  # with which chats are written
    text = loaded.decode(loaded.encode(_SAMPLE_TEXT))
    if text.strip() != _SAMPLE_TEXT:
        yield fail_finding(
            "tokenizer", f"{_SAMPLE_TEXT!r} comes back as {shorten(text)!r}", "check tokenizer.json"
        )
    # A warning: checkpoints with a few ids too many work for all texts that do not make them. Fewer
    # ids than scores are usual.
    elif model is not None and loaded.vocab_size > model.config.vocab:
        text = f"{loaded.vocab_size} tokens, and the model has scores for {model.config.vocab}"
        yield warn_finding(
            "tokenizer", text, "texts with the others are refused: is it the model's own tokenizer?"
        )
    else:
        yield pass_finding("tokenizer", f"{loaded.vocab_size} tokens")


def check_generation_config(directory: Path) -> Iterator[Finding]:
    """Check that generation_config.json, where there is one, can be read."""
    from headstock.text.generation_config import read_generation_config

    read_generation_config(directory)
    if (directory / "generation_config.json").exists():
        yield pass_finding("generation_config.json", "can be read")
