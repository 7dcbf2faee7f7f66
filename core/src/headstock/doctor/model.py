"""Checks of a checkpoint: there, readable, with a tokenizer that gives text back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from headstock import registry
from headstock.doctor.finding import Finding, failed, passed
from headstock.errors import ModelError, UnknownPlugin, plural, shown

SAMPLE = "Once upon a time"


def checkpoint(directory: Path) -> Iterator[Finding]:
    """Whether config.json names an architecture and every safetensors file holds what its header says."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    yield passed("config.json", ", ".join(config.get("architectures") or ["no architecture named"]))
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        hint = "other formats are not read; convert the checkpoint"
        yield failed("weights", "no .safetensors file", hint, ModelError.exit_code)
        return
    counts = {file: tensors(file) for file in files}
    size = sum(file.stat().st_size for file in files) / 2**20
    yield passed("weights", f"{plural(sum(counts.values()), 'tensor')} in {plural(len(files), 'file')}, {size:.1f} MiB")


def tensors(file: Path) -> int:
    """How many tensors the file holds; reading its header compares it with the file's size.   raises: ModelError"""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="numpy") as opened:
            return len(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file.name}: {shown(error)}; copy or download the checkpoint again") from None


def tokenizer(directory: Path) -> Iterator[Finding]:
    """Whether the tokenizer loads and gives a text back as it was."""
    from headstock.text.tokenizer import Tokenizer

    loaded = Tokenizer(directory)
    text = loaded.decode(loaded.encode(SAMPLE))
    if text.strip() == SAMPLE:
        yield passed("tokenizer", plural(loaded.vocab_size, "token"))
    else:
        yield failed("tokenizer", f"{SAMPLE!r} comes back as {shown(text)!r}", "check tokenizer.json")


def directory_of(model: str) -> Path:
    """The directory of a checkpoint given by path or by an installed name.   raises: ModelError, PluginBroken"""
    if Path(model).is_dir():
        return Path(model)
    if "/" in model or model.startswith("."):
        raise ModelError(f"--model {shown(model)}: no such directory; give a path that exists or an installed name")
    try:
        return Path(registry.spec("checkpoint", model).directory)
    except UnknownPlugin as error:
        raise ModelError(str(error)) from None
