"""Write what a GGUF file says of a model into a folder, as a model directory has it.

The folder has a config.json, the files of a tokenizer, a link to the file, and an index of its
tensors: families, tokenizers and servers read it as they read any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headstock.errors import ModelError, shorten
from headstock.weights.formats import GGUF, explain_gguf, find_gguf_shard
from headstock.weights.gguf.architectures import (
    find_architecture,
    translate_config,
    translate_tensors,
)
from headstock.weights.gguf.generation import translate_generation
from headstock.weights.gguf.header import GgufHeader, HeaderError, read_gguf_header
from headstock.weights.gguf.index import INDEX, LINK, make_index
from headstock.weights.gguf.metadata import Metadata
from headstock.weights.gguf.ropes import FACTORS
from headstock.weights.gguf.stored_tensor import StoredTensor
from headstock.weights.gguf.tensor_file import GgufFile
from headstock.weights.gguf.tokenizer import translate_tokenizer

FOLDER = "~/.cache/headstock/gguf"
"""Where the folders lie; each may be removed at any time."""

_VERSION = 5
"""Raised whenever a file would be translated in another way."""

_MAX_FACTORS = 1 << 16


def find_gguf(directory: Path) -> Path | None:
    """Find the GGUF file of a directory without other weights; None where it has none.

    raises: ModelError where it has several
    """
    if any(directory.glob("*.safetensors")) or (directory / "adapter_config.json").is_file():
        return None
    # Beside a model that takes images lies a second file, with its tower.
    files = sorted(path for path in directory.glob(GGUF) if not path.name.startswith("mmproj"))
    if len(files) > 1 and not find_gguf_shard(files[0]):
        raise ModelError(
            f"{directory} has {len(files)} GGUF files; set model (--model) to one, such as "
            f"{files[0]}"
        )
    return files[0] if files else None


def unpack_gguf(path: Path) -> Path:
    """Make the model directory of a GGUF file, unless there is one.

    returns: the directory
    raises: ModelError for a file that is damaged, or that is of a kind that is not read
    """
    if not path.is_file():
        raise ModelError(f"{path} is no regular file; give a GGUF file")
    if shard := find_gguf_shard(path):
        raise ModelError(
            f"{shorten(path.name)} is part {shard} of a model, and parts are not read; join them: "
            "llama-gguf-split --merge FIRST-PART WHOLE.gguf, and set model (--model) to that"
        )
    real = Path(os.path.realpath(path))
    root = Path(os.path.expanduser(FOLDER))
    folder = root / f"{_make_stem(path)}-{_hash(real)}"
    if (folder / INDEX).is_file():
        return folder
    files = _translate(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=root, prefix=".new-"))
        try:
            for name, content in files.items():
                (made / name).write_text(json.dumps(content), encoding="utf-8")
            (made / LINK).symlink_to(real)
            _rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{root}, where what {shorten(path.name)} says of the model is kept, cannot be "
            f"written: {shorten(error.strerror)}; set HOME to a folder that can"
        ) from error
    return folder


def _make_stem(path: Path) -> str:
    """A name for a folder by which a user knows the file."""
    return re.sub(r"[^\w.-]", "-", path.stem)[:80]


def _hash(real: Path) -> str:
    """What changes with the file: its place, its size and its time."""
    status = real.stat()
    facts = [_VERSION, str(real), status.st_size, status.st_mtime_ns]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _rename(made: Path, folder: Path) -> None:
    """Put the folder in its place, whole, unless another process has done so.   raises: OSError"""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / INDEX).is_file():
            raise


def _translate(path: Path) -> dict[str, Any]:
    """The contents of the folder's files, by their names.   raises: ModelError"""
    try:
        header = read_gguf_header(path)
        metadata = Metadata(header.metadata)
        find_architecture(metadata)
        if (metadata.find_count("split.count") or 0) > 1:
            raise HeaderError("it is one part of a model; join all by llama-gguf-split --merge")
        config = translate_config(header, _read_rope_factors(path, header))
        tensors = translate_tensors(header, config)
        return {
            "config.json": config,
            "generation_config.json": translate_generation(metadata),
            **translate_tokenizer(metadata),
            INDEX: make_index(header.size, tensors),
        }
    except HeaderError as error:
        raise ModelError(explain_gguf(path, str(error))) from error


def _read_rope_factors(path: Path, header: GgufHeader) -> dict[str, Sequence[float]]:
    """The numbers of those of `FACTORS` that the file has.   raises: HeaderError"""
    tensors = {name: header.tensors[name] for name in FACTORS if name in header.tensors}
    for name, tensor in tensors.items():
        if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_FACTORS:
            raise HeaderError(f"{name}: expected a list, got {shorten(list(tensor.shape))}")
    file = GgufFile(path, {name: StoredTensor(each) for name, each in tensors.items()}, header.size)
    return {name: file.read(name).float().tolist() for name in tensors}
