"""Model directories in Hugging Face layout, as untrusted input."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from headstock.errors import ModelError, shorten
from headstock.weights.formats import explain_directory, is_lfs_pointer

_REDIRECTING_FIELDS = ("configuration_files", "transformers_weights")
"""Fields by which transformers reads other files in place of config.json and model.safetensors."""

_MAX_JSON_BYTES = 64 << 20


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a model directory.

    raises: ModelError when it is missing, not JSON, or points to other files
    """
    # lexists: a link that leads nowhere is a fault of this directory and no other format.
    if not os.path.lexists(directory / "config.json"):
        missing = (
            f"{directory / 'config.json'} is missing; is {directory} a complete model directory?"
        )
        raise ModelError(explain_directory(directory) or missing)
    config = read_json(directory, "config.json")
    for name in _REDIRECTING_FIELDS:
        if config.get(name):
            raise ModelError(
                f"{directory / 'config.json'} has {name}, which points to other files and is not "
                "followed; put what it names into config.json and model.safetensors, and remove it"
            )
    return config


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a directory.

    They are model.safetensors, or those that model.safetensors.index.json names.

    raises: ModelError when there are none, one is missing, or one lies elsewhere
    """
    if (directory / "model.safetensors").exists():
        return [_resolve_inside(directory, "model.safetensors")]
    index = "model.safetensors.index.json"
    if not (directory / index).exists():
        absent = (
            f"{directory} has neither model.safetensors nor {index}; {_explain_weights(directory)}"
        )
        raise ModelError(explain_directory(directory) or absent)
    names = read_json(directory, index).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise ModelError(f"{directory / index} has no weight_map from tensor names to file names")
    return [_resolve_inside(directory, name) for name in sorted(set(names.values()))]


def _explain_weights(directory: Path) -> str:
    """Explain what a directory has in place of the files that `weight_files` reads."""
    others = sorted(
        path.name
        for path in directory.glob("*.safetensors")
        # An adapter beside a model is no part of it.
        if not path.name.startswith("adapter_")
    )
    if any(re.search(r"-\d+-of-\d+", name) for name in others):
        return (
            f"it has parts of a model, such as {shorten(others[0])}: copy or download the index too"
        )
    if others:
        return (
            f"it has {shorten(others[0])}: rename that to model.safetensors if it is the whole "
            "model"
        )
    return _explain_snapshot(directory) or "is the download complete?"


def _explain_snapshot(directory: Path) -> str:
    """Explain a repository of the hub whose copy has no weights; empty for other directories."""
    repository = directory.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    if directory.parent.name != "snapshots" or not directory.parent.parent.name.startswith(
        "models--"
    ):
        return ""
    return (
        f"{repository} on the hub has no .safetensors files at its top level, or they were not "
        "downloaded"
    )


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in a file of the directory.   raises: ModelError"""
    path = _resolve_inside(directory, name)
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise ModelError(
            f"{directory / name} has {path.stat().st_size} bytes, more than the {_MAX_JSON_BYTES} "
            "allowed"
        )
    try:
        if is_lfs_pointer(path):
            raise ModelError(
                f"{directory / name} is a Git LFS pointer: fetch the file with git lfs pull"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    # RecursionError: the file is untrusted, and json.loads recurses into every bracket.
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{directory / name} is not JSON: {shorten(error)}; copy or download it again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{directory / name} holds a {type(value).__name__}, wanted a JSON object")
    return value


def _resolve_inside(directory: Path, name: str) -> Path:
    """Resolve the real path of a file that must lie in the directory, also after links.

    raises: ModelError
    """
    real = Path(os.path.realpath(directory))
    # The hub's own cache keeps files in models--NAME/blobs and links to them from
    # models--NAME/snapshots/REVISION.
    cached = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    root = real.parent.parent if cached else real
    path = Path(os.path.realpath(real / name))
    if Path(name).name != name or not path.is_relative_to(root):
        raise ModelError(
            f"{shorten(name)} in {directory} leads out of the directory, which is not followed; "
            "copy the file in"
        )
    if not os.path.isfile(path):
        raise ModelError(
            f"{directory / name} is missing; is {directory} a complete model directory?"
        )
    return path
