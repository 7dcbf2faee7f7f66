"""Find a model in a directory, or in a repository on the Hugging Face hub."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from headstock.errors import ModelError, describe_error, shorten
from headstock.weights.formats import explain_file
from headstock.weights.gguf import find_gguf, unpack_gguf

_DOWNLOAD_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
"""The files of a repository that are downloaded: no pickles and no code."""

_REPOSITORY_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_ADDRESS = re.compile(
    rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?({_REPOSITORY_NAME.pattern})(?:/.*)?"
)
LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class NotDownloaded(ModelError):
    """A repository on the hub without a local copy."""


def resolve_directory(model: str, fetch: Callable[[str], Path] | None = None) -> Path:
    """Resolve `model` to a local directory, or to what `fetch` returns for `owner/name` on the hub.

    That of a GGUF file, or of a directory with one alone, is made of what the file says.
    `fetch` is `download_model` by default.

    raises: ModelError if the directory does not exist and cannot be downloaded
    """
    path = os.path.expanduser(model)
    # A directory first: what is here is never looked for on the network.
    if os.path.isdir(path):
        file = find_gguf(Path(path))
        return Path(path) if file is None else unpack_gguf(file)
    if os.path.exists(path) and path.endswith(".gguf"):
        return unpack_gguf(Path(path))
    if os.path.exists(path):
        raise ModelError(explain_file(Path(path)))
    if address := _HUB_ADDRESS.fullmatch(model):
        raise ModelError(
            f"{shorten(model)} is an address; set model (--model) to its name alone: "
            f"{shorten(address[1])}"
        )
    if not _REPOSITORY_NAME.fullmatch(model):
        raise ModelError(
            f"no model directory {shorten(model)}; give an existing directory, or owner/name for "
            "one on the hub"
        )
    return (fetch or download_model)(model)


def download_model(name: str, revision: str | None = None) -> Path:
    """Download a repository from the hub unless it is in the cache; return the directory.

    `revision` is a branch, a tag or a commit; the default is the main branch.

    raises: ModelError
    """
    from huggingface_hub import snapshot_download  # only here: it costs half a second to import

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(_DOWNLOAD_PATTERNS))
        )
    except Exception as error:  # whatever the network stack raises
        raise _unavailable_error(name, revision, error) from error


def find_cached(name: str, revision: str | None = None) -> Path:
    """Find a repository of the hub in the cache; nothing is downloaded.

    raises: NotDownloaded, ModelError where nothing may be downloaded
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # No later download could fix a missing copy, so it is an error and not NotDownloaded.
    if constants.HF_HUB_OFFLINE:
        return download_model(name, revision)
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(_DOWNLOAD_PATTERNS),
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError as error:
        raise NotDownloaded(
            f"{_repository_label(name, revision)} is not in the cache yet; 'headstock run' looks "
            "for it on the hub"
        ) from error
    except Exception as error:  # as above
        raise _unavailable_error(name, revision, error) from error


def _unavailable_error(name: str, revision: str | None, error: BaseException) -> ModelError:
    """Make the error for a name that is not a directory and cannot be downloaded from the hub."""
    why = explain_hub_failure(shorten(name), None if revision is None else shorten(revision), error)
    return ModelError(f"no directory {_repository_label(name, revision)}, and {why}")


def _repository_label(name: str, revision: str | None) -> str:
    """A repository as error texts show it."""
    return shorten(name) if revision is None else f"{shorten(name)} at revision {shorten(revision)}"


def explain_hub_failure(name: str, revision: str | None, error: BaseException) -> str:
    """Explain why the hub did not give a repository, after "no directory NAME, and "."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        DisabledRepoError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # the cache has it not, and this is why it could not be fetched
    page = f"{constants.ENDPOINT}/{name}"
    version, without = (
        ("", "")
        if revision is None
        else (f" --revision {revision}", ", without revision (--revision)")
    )
    command = f"'hf download {name}{version} --local-dir DIR'"
    elsewhere = f"or download it elsewhere with {command} and set model (--model) to that{without}"
    # The order matters: a gated repository is a RepositoryNotFoundError, and all HfHubHTTPErrors
    # are OSErrors.
    match error:
        case GatedRepoError():
            return f"on the hub it is gated: accept its terms at {page}, then {LOG_IN}"
        case RepositoryNotFoundError():
            return (
                f"the hub has no such model, or it is private: check the name at {page}; for a "
                f"private one {LOG_IN}"
            )
        case RevisionNotFoundError():
            return (
                f"on the hub it has no such revision: choose one of {page}/tree/main, a "
                "branch, a tag or a commit"
            )
        case DisabledRepoError():
            return f"on the hub it is disabled: {page} may say why; choose another model"
        case HFValidationError():
            return f"that cannot be a name on the hub either ({shorten(error)}); give owner/name"
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"the hub refused access ({error.response.status_code}): {LOG_IN}"
        case HfHubHTTPError() if error.response.status_code == 429:
            return (
                f"the hub has had too many requests from here (429): try again later, or {LOG_IN}"
            )
        case HfHubHTTPError():
            return f"the hub answered {error.response.status_code}: try again later, {elsewhere}"
        case OfflineModeIsEnabled() | LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            cache = shorten(constants.HF_HUB_CACHE)
            return (
                f"HF_HUB_OFFLINE is set and the cache {cache} has no whole copy: unset it to "
                f"download, {elsewhere}"
            )
        case OSError() if error.errno in _DISK_FULL_ERRNOS:
            return (
                f"the disk is full, writing to {shorten(constants.HF_HUB_CACHE)}: make room, or "
                "set HF_HOME to another disk"
            )
        case PermissionError():
            return (
                f"{shorten(constants.HF_HUB_CACHE)} cannot be written: set HF_HOME to a folder "
                "that can"
            )
        case _:
            return (
                f"the hub cannot be reached ({describe_error(error)}): check the network and the "
                f"proxy, {elsewhere}"
            )
