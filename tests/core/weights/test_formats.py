"""What is no model directory in Hugging Face layout is named as what it is, with the command that
helps.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headstock.errors import ModelError
from headstock.weights import read_config, resolve_directory
from headstock.weights.directory import weight_files
from headstock.weights.formats import explain_gguf

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def refuse(function: Callable[..., Any], argument: Any) -> str:
    """The one line with which the function refuses the argument."""
    with pytest.raises(ModelError) as error:
        function(argument)
    assert "\n" not in str(error.value)
    return str(error.value)


def write(directory: Path, *names: str) -> Path:
    """The directory with these files, each with a plausible beginning."""
    contents = {
        "config.json": json.dumps({"architectures": ["Qwen3ForCausalLM"]}),
        "adapter_config.json": json.dumps({"base_model_name_or_path": "owner/base"}),
    }
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(contents.get(name, "x"))
    return directory


def command_of(message: str) -> list[str]:
    """The arguments of the Python command at the end of an error, its program compiled."""
    _, _, command = message.partition("python -c ")
    program, *arguments = shlex.split(command)
    compile(program, "hint", "exec")
    return arguments


def test_a_file_of_a_model_is_answered_with_its_directory(tmp_path: Path) -> None:
    directory = write(
        tmp_path / "my model", "config.json", "model.safetensors", "training_args.bin"
    )
    for name in ("config.json", "model.safetensors", "training_args.bin"):
        message = refuse(resolve_directory, str(directory / name))
        assert message.endswith(
            f"is one file of a model; set model (--model) to its directory: '{directory}'"
        )


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt"])
def test_a_file_without_a_config_beside_it(tmp_path: Path, name: str) -> None:
    message = refuse(resolve_directory, str(write(tmp_path, name) / name))
    assert (
        "is a file; set model (--model) to the directory that holds config.json, a tokenizer and "
        ".safetensors" in message
    )


def test_what_reads_a_directory_names_the_gguf_file_in_it(tmp_path: Path) -> None:
    directory = write(tmp_path / "it's", "small.gguf")
    file = shlex.quote(str(directory / "small.gguf"))
    for message in (
        refuse(read_config, directory),
        refuse(weight_files, write(directory, "config.json")),
    ):
        assert message.endswith(
            f"has a model in the GGUF format; set model (--model) to its file: {file}"
        )


def test_a_gguf_file_that_is_not_read_says_how_to_convert_it(tmp_path: Path) -> None:
    message = explain_gguf(write(tmp_path / "it's", "small.gguf") / "small.gguf", "it is odd")
    assert message.startswith(
        "small.gguf: it is odd; use the model that it was made from, or convert it: pip install "
        "gguf accelerate && python -c "
    )
    assert command_of(message) == [str(tmp_path / "it's"), "small.gguf", "./small-safetensors"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickles_that_transformers_reads_say_how_to_convert(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path / "old", "config.json", name)
    for message in (
        refuse(resolve_directory, str(directory / name)),
        refuse(weight_files, directory),
    ):
        assert (
            f"has weights only as pickles ({name}), which can run code; if you trust them, "
            "convert them: " in message
        )
        assert command_of(message) == [str(directory), "./old-safetensors"]


@pytest.mark.parametrize(
    "names", [("consolidated.00.pth",), ("config.json", "model.pt"), ("last.ckpt",)]
)
def test_pickles_of_another_layout_are_not_said_to_be_convertible(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    message = refuse(weight_files, write(tmp_path, *names))
    assert message.endswith(
        "which can run code; get the model as a directory with config.json and .safetensors, as "
        "most on the hub are"
    )


def test_an_adapter_names_its_model_and_says_how_to_merge(tmp_path: Path) -> None:
    directory = write(tmp_path / "lora", "adapter_config.json", "adapter_model.safetensors")
    for function in (read_config, weight_files):
        message = refuse(function, directory)
        assert (
            " holds an adapter of owner/base, and adapters are not supported; merge it" in message
        )
        assert "pip install peft && python -c" in message
        assert command_of(message) == [str(directory), "owner/base", "./lora-safetensors"]
        write(directory, "config.json")
    (directory / "adapter_config.json").write_text("[]")
    assert "an adapter of BASE" in refuse(weight_files, directory)


@pytest.mark.parametrize("inside", ["model", "snapshots/0123", "models--a--b/snapshots/0123"])
def test_a_folder_with_a_model_in_it_names_that(tmp_path: Path, inside: str) -> None:
    message = refuse(read_config, write(tmp_path, f"{inside}/config.json"))
    assert message.endswith(f" in it is; set model (--model) to {tmp_path / inside}")


def test_an_empty_directory_is_called_empty(tmp_path: Path) -> None:
    assert refuse(read_config, tmp_path).endswith(
        " is empty; give the directory that holds config.json, a tokenizer and .safetensors"
    )


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (
            ["weights.safetensors"],
            "it has weights.safetensors: rename that to model.safetensors if it is the whole model",
        ),
        (
            ["model-00001-of-00002.safetensors"],
            (
                "it has parts of a model, such as model-00001-of-00002.safetensors: copy or "
                "download the index too"
            ),
        ),
        ([], "is the download complete?"),
    ],
)
def test_weights_under_other_names(tmp_path: Path, names: list[str], advice: str) -> None:
    message = refuse(weight_files, write(tmp_path, "config.json", *names))
    assert (
        message
        == f"{tmp_path} has neither model.safetensors nor model.safetensors.index.json; {advice}"
    )


def test_a_repository_without_safetensors_is_not_called_incomplete(tmp_path: Path) -> None:
    snapshot = write(tmp_path / "models--some-owner--a--b" / "snapshots" / "0123", "config.json")
    message = refuse(weight_files, snapshot)
    hint = (
        "if some-owner/a--b has .gguf files, download one with 'hf download some-owner/a--b FILE' "
        "and set model (--model) to its path"
    )
    assert message.endswith(
        "some-owner/a--b on the hub has no .safetensors files at its top level, or they were not "
        f"downloaded; {hint}"
    )
    (snapshot / "config.json").rename(snapshot / "other.json")
    assert refuse(read_config, snapshot).endswith(f"config.json is missing; {hint}")


def test_a_git_lfs_pointer_is_named(tmp_path: Path, write: Any, loading: Any, tensors: Any) -> None:
    directory = write(tensors)
    for name in ("model.safetensors", "config.json"):
        (directory / name).write_text(POINTER)
        message = refuse(loading, directory)
        assert (
            message == f"{directory / name} is a Git LFS pointer: fetch the file with git lfs pull"
        )


@pytest.mark.full  # transformers takes half a minute
def test_the_command_for_pickles_converts_them(
    tmp_path: Path, write: Any, loading: Any, tensors: Any
) -> None:
    directory = write(tensors, model_type="qwen3", tie_word_embeddings=False)
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    (directory / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (directory / "merges.txt").write_text("")
    command = re.sub(
        "python -c",
        f"{shlex.quote(sys.executable)} -c",
        refuse(weight_files, directory).partition("them: ")[2],
    )
    result = subprocess.run(
        command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    converted = loading(tmp_path / f"{directory.name}-safetensors")
    save_file(tensors, directory / "model.safetensors")
    expected = loading(directory)
    assert all(torch.equal(expected[name].tensor, converted[name].tensor) for name in expected)
