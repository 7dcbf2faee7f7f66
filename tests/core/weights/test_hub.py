"""Names of models, and what is said of each way in which the hub does not give one."""

from __future__ import annotations

import errno
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from headstock.errors import ModelError, UsageError
from headstock.startup.model_loading import locate_model
from headstock.weights import NotDownloaded, download_model, find_cached, resolve_directory


def refuse(name: str) -> str:
    """The one line with which a name is refused."""
    with pytest.raises(ModelError) as error:
        resolve_directory(name)
    assert "\n" not in str(error.value)
    return str(error.value)


def answer(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """The error of an HTTP status, as the library makes it."""
    http = import_module(
        errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0]
    )  # httpx, or httpx2 in later ones
    response = http.Response(
        status, request=http.Request("GET", PAGE), headers={"x-request-id": "1"}
    )
    return kind(f"{status} of the hub", response=response)


def caused(cause: BaseException) -> errors.LocalEntryNotFoundError:
    """What the library raises when the cache has no copy and `cause` kept it from making one."""
    error = errors.LocalEntryNotFoundError("nothing in the cache")
    error.__cause__ = cause
    return error


LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"
ELSEWHERE = (
    "or download it elsewhere with 'hf download own/it --local-dir DIR' and set model (--model) "
    "to that"
)
PAGE = "https://huggingface.co/own/it"
FAILURES = {
    "gated": (
        lambda: answer(errors.GatedRepoError, 403),
        f"on the hub it is gated: accept its terms at {PAGE}, then {LOG_IN}",
    ),
    "absent": (
        lambda: answer(errors.RepositoryNotFoundError, 404),
        (
            f"the hub has no such model, or it is private: check the name at {PAGE}; for a private "
            f"one {LOG_IN}"
        ),
    ),
    "disabled": (
        lambda: answer(errors.DisabledRepoError, 403),
        f"on the hub it is disabled: {PAGE} may say why; choose another model",
    ),
    "name": (
        lambda: errors.HFValidationError("no"),
        "that cannot be a name on the hub either (no); give owner/name",
    ),
    "refused": (
        lambda: answer(errors.HfHubHTTPError, 401),
        f"the hub refused access (401): {LOG_IN}",
    ),
    "rate": (
        lambda: caused(answer(errors.HfHubHTTPError, 429)),
        f"the hub has had too many requests from here (429): try again later, or {LOG_IN}",
    ),
    "down": (
        lambda: caused(answer(errors.HfHubHTTPError, 503)),
        f"the hub answered 503: try again later, {ELSEWHERE}",
    ),
    "network": (
        lambda: caused(ConnectionError("no route")),
        (
            "the hub cannot be reached (ConnectionError: no route): check the network and the "
            f"proxy, {ELSEWHERE}"
        ),
    ),
    "full": (
        lambda: OSError(errno.ENOSPC, "No space left on device"),
        "the disk is full, writing to CACHE: make room, or set HF_HOME to another disk",
    ),
    "forbidden": (
        lambda: PermissionError(errno.EACCES, "Permission denied"),
        "CACHE cannot be written: set HF_HOME to a folder that can",
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_of_the_hub_has_a_line_and_a_next_move(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = FAILURES[failure]

    def fail(*arguments: Any, **options: Any) -> str:
        raise make()

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "CACHE")

    assert refuse("own/it") == f"no directory own/it, and {message}"


def test_the_command_for_a_download_elsewhere_has_the_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise caused(ConnectionError("no route"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError) as caught:
        download_model("own/it", "v1.2")
    message = str(caught.value)
    command = "'hf download own/it --revision v1.2 --local-dir DIR'"
    assert message.endswith(
        f" with {command} and set model (--model) to that, without revision (--revision)"
    )


def test_offline_is_said_with_the_variable_that_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    message = refuse("own/it")

    assert message.startswith("no directory own/it, and HF_HUB_OFFLINE is set and the cache ")
    assert message.endswith(f" has no whole copy: unset it to download, {ELSEWHERE}")
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        find_cached("own/it")


def test_what_is_in_the_cache_is_found_without_the_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        NotDownloaded,
        match=r"own/it is not in the cache yet; 'headstock run' looks for it on the hub",
    ):
        find_cached("own/it")
    snapshot = tmp_path / "models--own--it" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--own--it" / "refs").mkdir()
    (tmp_path / "models--own--it" / "refs" / "main").write_text("0123")

    assert find_cached("own/it") == snapshot
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_directory("own/it") == find_cached("own/it") == snapshot


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/own/it",
        "http://www.huggingface.co/own/it/",
        "https://huggingface.co/own/it/tree/main",
        "hf.co/own/it",
        "https://hf.co/own/it/blob/main/config.json",
    ],
)
def test_an_address_of_the_hub_is_answered_with_the_name_in_it(address: str) -> None:
    assert refuse(address).endswith(" is an address; set model (--model) to its name alone: own/it")


def make_cache(folder: Path, revision: str, commit: str) -> Path:
    """A copy of own/it in a cache, as the library keeps one."""
    snapshot = folder / "models--own--it" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = folder / "models--own--it" / "refs"
    refs.mkdir(exist_ok=True)
    (refs / revision).write_text(commit)
    return snapshot


def test_a_revision_of_a_model_on_the_hub_is_that_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    main, older = make_cache(tmp_path, "main", "0123"), make_cache(tmp_path, "v1", "4567")

    assert locate_model("own/it") == locate_model("own/it", find_cached) == main
    assert (
        locate_model("own/it", revision="v1") == locate_model("own/it", find_cached, "v1") == older
    )
    with pytest.raises(
        ModelError, match=r"^no directory own/it at revision v2, and HF_HUB_OFFLINE is set"
    ):
        locate_model("own/it", revision="v2")


def test_a_revision_that_the_hub_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        assert options["revision"] == "v2"
        raise answer(errors.RevisionNotFoundError, 404)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError) as error:
        locate_model("own/it", revision="v2")
    message = (
        "on the hub it has no such revision: choose one of https://huggingface.co/own/it/tree/main"
    )
    assert (
        str(error.value)
        == f"no directory own/it at revision v2, and {message}, a branch, a tag or a commit"
    )


def test_a_revision_of_a_directory_or_an_installed_model_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path), "demo"):
        with pytest.raises(
            UsageError,
            match=r"\(--revision\) v1: .* is installed here, and only models on the hub have",
        ):
            locate_model(name, revision="v1")
