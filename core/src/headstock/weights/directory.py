"""Model directories in Hugging Face layout, as untrusted input."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from headstock.errors import ModelError, shown

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NEEDED = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
"""What is fetched of a repository on the hub: no pickles and no code."""

ELSEWHERE = ("configuration_files", "transformers_weights")
"""Fields by which transformers reads other files in place of config.json and model.safetensors."""

LARGEST_JSON = 64 << 20


def resolve_directory(model: str) -> Path:
    """The directory that `model` names: a local one, or else the downloaded copy of a hub repository `owner/name`.

    raises: ModelError when there is no such directory and it cannot be fetched
    """
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise ModelError(f"{shown(model)} is a file; --model wants the directory that holds config.json")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        raise ModelError(
            f"no model directory {shown(model)}; give an existing directory, or owner/name for one on the hub"
        )
    from huggingface_hub import snapshot_download  # only here: it costs half a second to import

    try:
        return Path(snapshot_download(model, allow_patterns=list(NEEDED)))
    except Exception as error:  # whatever the network stack raises, the user's next move is the same
        raise ModelError(
            f"no directory {shown(model)}, and the hub did not give it ({type(error).__name__}); "
            "download it where there is a network and pass its directory as --model"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed config.json of a model directory that can be loaded without running anything from it.

    raises: ModelError when it is missing, not JSON, asks for code, or points to other files; when all weights are
    pickles
    """
    config = read_json(directory, "config.json")
    if "auto_map" in config:
        raise ModelError(
            f"{directory / 'config.json'} has auto_map: the model wants its own code run, which is never done"
        )
    for name in ELSEWHERE:
        if config.get(name):
            raise ModelError(
                f"{directory / 'config.json'} has {name}, which points to other files and is not followed; "
                "put what it names into config.json and model.safetensors, and remove it"
            )
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles and not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"{directory} has weights only as pickles ({shown(pickles[0])}), which can run code; convert them"
        )
    return config


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: model.safetensors, or those that model.safetensors.index.json names.

    raises: ModelError when there are none, one is missing, or one lies elsewhere
    """
    if (directory / "model.safetensors").exists():
        return [file_inside(directory, "model.safetensors")]
    index = "model.safetensors.index.json"
    if not (directory / index).exists():
        raise ModelError(f"{directory} has neither model.safetensors nor {index}; is the download complete?")
    names = read_json(directory, index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{directory / index} has no weight_map from tensor names to file names")
    return [file_inside(directory, name) for name in sorted(set(names.values()))]


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the directory."""
    path = file_inside(directory, name)
    if path.stat().st_size > LARGEST_JSON:
        raise ModelError(f"{directory / name} has {path.stat().st_size} bytes, more than the {LARGEST_JSON} allowed")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{directory / name} is not JSON: {shown(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{directory / name} holds a {type(value).__name__}, wanted a JSON object")
    return value


def file_inside(directory: Path, name: str) -> Path:
    """The real path of a file that lies in the directory, also after links are followed."""
    real = Path(os.path.realpath(directory))
    # The hub's own cache keeps files in models--NAME/blobs and links to them from models--NAME/snapshots/REVISION.
    cached = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    root = real.parent.parent if cached else real
    path = Path(os.path.realpath(real / name))
    if Path(name).name != name or not path.is_relative_to(root):
        raise ModelError(
            f"{shown(name)} in {directory} leads out of the directory, which is not followed; copy the file in"
        )
    if not os.path.isfile(path):
        raise ModelError(f"{directory / name} is missing; is {directory} a complete model directory?")
    return path
