"""Links of a model directory: weights alone are followed out of it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from headstock.errors import ModelError
from headstock.weights import read_config


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside every model directory."""
    return tmp_path_factory.mktemp("elsewhere")


def move_out(directory: Path, name: str, elsewhere: Path) -> None:
    """Move a file elsewhere, and leave a link to it."""
    (directory / name).rename(elsewhere / name)
    (directory / name).symlink_to(elsewhere / name)


@pytest.mark.parametrize("target", ["model.safetensors", "0a1b2c"])
def test_weights_are_followed_out_of_a_directory_with_a_log_line(
    write: Any,
    loading: Any,
    tensors: Any,
    elsewhere: Path,
    caplog: pytest.LogCaptureFixture,
    target: str,
) -> None:
    directory = write(tensors)
    (directory / "model.safetensors").rename(elsewhere / target)
    (directory / "model.safetensors").symlink_to(elsewhere / target)

    with caplog.at_level(logging.WARNING):
        params = loading(directory)

    assert torch.equal(params["norm"].tensor, tensors["model.norm.weight"])
    (line,) = [record.getMessage() for record in caplog.records]
    assert "links out of the model directory" in line
    assert str(elsewhere) in line


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        *("chat_template.jinja", "tokenizer.model", "vocab.txt", "merges.txt", "vocab.json"),
        "additional_chat_templates",
    ],
)
def test_other_files_are_not_followed(write: Any, tensors: Any, elsewhere: Path, name: str) -> None:
    directory = write(tensors)
    (elsewhere / name).write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(elsewhere / name)

    with pytest.raises(ModelError, match=f"{name} in .* leads out of the directory"):
        read_config(directory)


def test_a_template_among_several_is_not_followed(
    write: Any, tensors: Any, elsewhere: Path
) -> None:
    directory = write(tensors)
    (directory / "additional_chat_templates").mkdir()
    (elsewhere / "secret").write_text("secret")
    (directory / "additional_chat_templates" / "tools.jinja").symlink_to(elsewhere / "secret")

    with pytest.raises(ModelError, match=r"tools\.jinja in .* leads out of the directory"):
        read_config(directory)


def test_links_inside_a_directory_and_of_files_that_nothing_reads(
    write: Any, tensors: Any, elsewhere: Path
) -> None:
    directory = write(tensors)
    (elsewhere / "notes").write_text("")
    for name in ("README.md", "LICENSE.txt", "model.py"):
        (directory / name).symlink_to(elsewhere / "notes")
    (directory / "config.json").rename(directory / "real.json")
    (directory / "config.json").symlink_to("real.json")

    assert read_config(directory)["hidden_size"] == 8


def test_a_repository_of_the_hub_stays_inside(
    write: Any, loading: Any, tensors: Any, elsewhere: Path, tmp_path: Path
) -> None:
    flat = write(tensors)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (flat / "config.json").rename(snapshot / "config.json")
    (flat / "model.safetensors").rename(snapshot / "model.safetensors")
    move_out(snapshot, "model.safetensors", elsewhere)

    for directory in (snapshot, tmp_path / "named"):
        if directory != snapshot:
            directory.symlink_to(snapshot)
        with pytest.raises(ModelError, match=r"model\.safetensors in .* leads out"):
            loading(directory)


def make_fifo(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def link_to_fifo(path: Path, elsewhere: Path) -> None:
    os.mkfifo(elsewhere / "fifo")
    path.symlink_to(elsewhere / "fifo")


def link_to_folder(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def link_nowhere(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere / "absent")


def link_to_itself(path: Path, elsewhere: Path) -> None:
    path.symlink_to(path.name)


def link_to_device(path: Path, elsewhere: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "make",
    [make_fifo, link_to_fifo, link_to_folder, link_nowhere, link_to_itself, link_to_device],
)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_regular_file_is_named(
    write: Any, loading: Any, tensors: Any, elsewhere: Path, make: Any, name: str
) -> None:
    directory = write(tensors)
    (directory / name).unlink(missing_ok=True)
    make(directory / name, elsewhere)

    with pytest.raises(ModelError, match=rf"{name} (is|in) .*(no regular file|leads out)"):
        loading(directory)


def test_a_link_to_what_is_no_safetensors_file_shows_none_of_its_text(
    write: Any, loading: Any, tensors: Any, elsewhere: Path
) -> None:
    directory = write(tensors)
    (elsewhere / "passwords").write_text("secret" * 20)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to(elsewhere / "passwords")

    with pytest.raises(ModelError) as error:
        loading(directory)
    assert "damaged" in str(error.value)
    assert "secret" not in str(error.value)
