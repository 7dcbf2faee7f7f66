"""Model directories in Hugging Face layout, as untrusted input."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from headstock.errors import ModelError, describe_type, shorten
from headstock.logs import LogEvent, log_event
from headstock.weights.formats import explain_directory, is_lfs_pointer

_REDIRECTING_FIELDS = ("configuration_files", "transformers_weights")
"""Fields by which transformers reads other files instead of config.json and model.safetensors."""

_MAX_JSON_BYTES = 64 << 20

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_GGUF = ".gguf"

_TEMPLATES = "additional_chat_templates"
_TEXT_SUFFIXES = (".json", ".jinja", ".model")
_TEXT_FILES = (_TEMPLATES, "vocab.txt", "merges.txt")
"""What transformers reads of a directory beside weights and code."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read the config.json of a model directory.

    raises: ModelError when it is missing, not JSON, or points to other files
    """
    # lexists: a link that leads nowhere is a fault of this directory and no other format.
    if not os.path.lexists(directory / "config.json"):
        advice = _suggest_gguf(directory) or f"is {directory} a complete model directory?"
        missing = f"{directory / 'config.json'} is missing; {advice}"
        raise ModelError(explain_directory(directory) or missing)
    check_links(directory)
    config = read_json(directory, "config.json")
    for name in _REDIRECTING_FIELDS:
        if config.get(name):
            raise ModelError(
                f"{directory / 'config.json'} has {name}, which points to other files and is not "
                "followed; put what it names into config.json and model.safetensors, and remove it"
            )
    return config


@frozen
class WeightFiles:
    """The safetensors files of a model directory.

    paths: real paths by file name
    assigned: the file that the index names for each tensor; empty without an index
    remarks: what is odd about the directory, for the log
    """

    paths: Mapping[str, Path]
    assigned: Mapping[str, str]
    remarks: tuple[LogEvent, ...]


def weight_files(directory: Path) -> WeightFiles:
    """Find the safetensors files of a directory.

    They are those that model.safetensors.index.json names, or else model.safetensors.

    raises: ModelError if there are no files, one is missing, or one lies elsewhere
    """
    # lexists: a link that leads nowhere must not give way to another file in silence.
    has_whole, has_index = (os.path.lexists(directory / name) for name in (_WHOLE, _INDEX))
    if not has_whole and not has_index:
        absent = f"{directory} has neither {_WHOLE} nor {_INDEX}; {_explain_weights(directory)}"
        raise ModelError(explain_directory(directory) or absent)
    assigned = _read_index(directory) if has_index else {}
    names = sorted(set(assigned.values())) or [_WHOLE]
    is_stray = has_whole and _WHOLE not in names
    for name in names:
        if is_stray and not os.path.lexists(directory / name):
            raise ModelError(
                f"{directory / name} is missing, which {_INDEX} names; copy or download it, or "
                f"remove the index to load {_WHOLE}, which lies beside it"
            )
    paths = {name: resolve_file(directory, name) for name in names}
    others = [name for name in names if not name.endswith(_SUFFIX)]
    if others:
        raise ModelError(
            f"{directory / _INDEX} names {shorten(others[0])}, and only {_SUFFIX} files are read"
        )
    remarks = []
    if is_stray:
        because = f"{_INDEX} does not name it"
        remarks.append(log_event("a file of weights is not read", file=_WHOLE, because=because))
    root = _find_root(directory)
    outside = [name for name, path in paths.items() if not path.is_relative_to(root)]
    if outside:
        facts = {"file": outside[0], "target": paths[outside[0]], "links": len(outside)}
        remarks.append(log_event("weights are links out of the model directory", **facts))
    return WeightFiles(paths=paths, assigned=assigned, remarks=tuple(remarks))


def _read_index(directory: Path) -> Mapping[str, str]:
    """Read the file name of each tensor.   raises: ModelError"""
    assigned = read_json(directory, _INDEX).get("weight_map")
    if (
        not isinstance(assigned, dict)
        or not assigned
        or not all(isinstance(name, str) for name in assigned.values())
    ):
        raise ModelError(f"{directory / _INDEX} has no weight_map from tensor names to file names")
    return assigned


def _explain_weights(directory: Path) -> str:
    """Explain what a directory has instead of the files that `weight_files` reads."""
    others = sorted(
        path.name
        for path in directory.glob("*.safetensors")
        # An adapter next to a model is not part of it.
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
    repository = _name_repository(directory)
    return repository and (
        f"{repository} on the hub has no .safetensors files at its top level, or they were not "
        f"downloaded; {_suggest_gguf(directory)}"
    )


def _suggest_gguf(directory: Path) -> str:
    """What to do with a repository of GGUF files; empty for other directories."""
    repository = _name_repository(directory)
    return repository and (
        f"if {repository} has .gguf files, download one with 'hf download {repository} FILE' and "
        "set model (--model) to its path"
    )


def _name_repository(directory: Path) -> str:
    """The repository of the hub that the directory is a copy of; empty for other directories."""
    folder = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not folder.startswith("models--"):
        return ""
    return folder.removeprefix("models--").replace("--", "/", 1)


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in a file of the directory.   raises: ModelError"""
    path = resolve_file(directory, name)
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
        raise ModelError(f"{directory / name}: expected a JSON object, got {describe_type(value)}")
    return value


def resolve_file(directory: Path, name: str) -> Path:
    """Resolve the real path of a regular file of the directory.

    A link may leave the directory where it is that of a .safetensors file.

    raises: ModelError
    """
    # From an index, a name may be any text: also one that no system call takes.
    if not name or Path(name).name != name or not name.isprintable():
        raise _make_outside_error(directory, name)
    if not os.path.lexists(directory / name):
        raise ModelError(
            f"{shorten(directory / name, 200)} is missing; is {directory} a complete model "
            "directory?"
        )
    path = Path(os.path.realpath(directory / name))
    if _leads_out(directory, path, name):
        raise _make_outside_error(directory, name)
    # A FIFO or a device could block the reader forever.
    if not os.path.isfile(path):
        what = (
            f"a link to {shorten(path, 200)}, where no regular file is"
            if os.path.islink(directory / name)
            else "no regular file"
        )
        raise ModelError(f"{directory / name} is {what}; copy the file in")
    return path


def _find_root(directory: Path) -> Path:
    """The folder that links of the directory may lead to: itself, or its repository's cache."""
    real = Path(os.path.realpath(directory))
    # The hub's own cache keeps files in models--NAME/blobs and links to them from
    # models--NAME/snapshots/REVISION.
    return real.parent.parent if _is_cached(real) else real


def _is_cached(real: Path) -> bool:
    """Whether the directory is a repository in the hub's cache."""
    return real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")


def _leads_out(directory: Path, path: Path, name: str) -> bool:
    """Whether the real path of the file of that name is one that is not followed."""
    # Weights alone are followed, out of directories that the user names: what is no safetensors
    # file is refused by its header, and of GGUF files numbers alone are read. The text of another
    # file could end up in a prompt.
    is_cached = _is_cached(Path(os.path.realpath(directory)))
    is_followed = name.endswith((_SUFFIX, _GGUF)) and not is_cached
    return not is_followed and not path.is_relative_to(_find_root(directory))


def _make_outside_error(directory: Path, name: str) -> ModelError:
    """The error for a file elsewhere."""
    return ModelError(
        f"{shorten(name)} in {directory} leads out of the directory, which is not followed; copy "
        "the file in"
    )


def check_links(directory: Path) -> None:
    """Check the links among the files that a tokenizer, a template and settings are read from.

    raises: ModelError for one that leads out of the directory
    """
    templates = directory / _TEMPLATES
    # transformers reads them by these names, and follows any link.
    try:
        files = [*directory.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
    except OSError as error:
        raise ModelError(f"{directory} cannot be read: {shorten(error.strerror)}") from error
    for path in files:
        is_read = path.suffix in _TEXT_SUFFIXES or path.name in _TEXT_FILES
        if is_read and _leads_out(directory, Path(os.path.realpath(path)), path.name):
            raise _make_outside_error(directory, str(path.relative_to(directory)))
