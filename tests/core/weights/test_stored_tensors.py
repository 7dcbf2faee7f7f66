"""Which file a tensor is read from, and under which name it is found."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

from headstock.errors import ModelError, PluginBroken
from headstock.spi import ParamSpec
from headstock.weights import find_missing_heads, load_weights, read_config
from headstock.weights.directory import weight_files
from headstock_qwen.families import QWEN3

NORM = "model.norm.weight"
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


def spread(directory: Path, tensors: Any, **elsewhere: str) -> None:
    """Write the tensors to two files in turn, and the index of both, with changes."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    names = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, directory / file)
    write_index(directory, {**names, **elsewhere})


def write_index(directory: Path, names: dict[str, str]) -> None:
    """An index without metadata."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def refused(loading: Any, directory: Path) -> str:
    """The one line with which the directory is refused."""
    with pytest.raises(ModelError) as error:
        loading(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that loading logged."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_index_decides_over_a_stray_file(
    write: Any, loading: Any, tensors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write(tensors)
    spread(directory, tensors)
    for stray in ("model.safetensors", "consolidated.safetensors"):
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, directory / stray)

    assert torch.equal(loading(directory)["norm"].tensor, tensors[NORM])
    (line,) = logged(caplog)
    assert "file=model.safetensors" in line
    assert "model.safetensors.index.json does not name it" in line


def test_an_index_may_name_the_whole_file(
    write: Any, loading: Any, tensors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write(tensors)
    write_index(directory, dict.fromkeys(tensors, "model.safetensors"))

    assert torch.equal(loading(directory)["norm"].tensor, tensors[NORM])
    assert logged(caplog) == []


def test_a_stray_file_stands_for_no_missing_part(write: Any, loading: Any, tensors: Any) -> None:
    directory = write(tensors)
    spread(directory, tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "part-1.safetensors").unlink()

    message = refused(loading, directory)
    assert "part-1.safetensors is missing" in message
    assert "remove the index to load model.safetensors" in message


@pytest.mark.parametrize("names", [[NORM], [NORM, HEAD, EMBED]], ids=len)
def test_the_index_decides_between_files_with_one_tensor(
    write: Any, loading: Any, tensors: Any, caplog: pytest.LogCaptureFixture, names: list[str]
) -> None:
    directory = write(tensors)
    stale = {name: tensors[name] * 2 for name in names}
    spread(directory, tensors, other="part-2.safetensors", another="a-part.safetensors")
    save_file(stale, directory / "part-2.safetensors")
    save_file(
        {name: tensor.half() for name, tensor in stale.items()}, directory / "a-part.safetensors"
    )

    params = loading(directory)

    assert torch.equal(params["norm"].tensor, tensors[NORM])
    assert torch.equal(params["lm_head"].tensor, tensors[HEAD])
    (line,) = logged(caplog)
    assert f"tensors={len(names)}" in line
    assert "other=a-part.safetensors" in line


def test_a_tensor_that_one_other_file_holds_is_read_there(
    write: Any, loading: Any, tensors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write(tensors)
    spread(directory, tensors, **{NORM: "part-1.safetensors", HEAD: "part-0.safetensors"})

    params = loading(directory)

    assert torch.equal(params["norm"].tensor, tensors[NORM])
    assert torch.equal(params["lm_head"].tensor, tensors[HEAD])
    assert "the index assigns elsewhere" in " ".join(logged(caplog))


def test_a_tensor_in_two_files_that_the_index_gives_to_neither(
    write: Any, loading: Any, tensors: Any
) -> None:
    directory = write(tensors)
    spread(directory, tensors, **{HEAD: "part-3.safetensors", "other": "part-2.safetensors"})
    save_file({HEAD: tensors[HEAD]}, directory / "part-2.safetensors")
    save_file({"other": torch.ones(1)}, directory / "part-3.safetensors")

    assert f"{HEAD} is in both" in refused(loading, directory)


def test_a_tensor_that_the_index_has_and_no_file(write: Any, loading: Any, tensors: Any) -> None:
    directory = write(tensors)
    norm = tensors.pop(NORM)
    spread(directory, tensors, **{NORM: "part-1.safetensors"})

    message = refused(loading, directory)
    assert f"missing {NORM}" in message
    assert f"the index has {NORM} in part-1.safetensors, which lacks it" in message
    # One that the model has no use for is not missed.
    unused = "model.layers.0.self_attn.rotary_emb.inv_freq"
    spread(directory, {**tensors, NORM: norm}, **{unused: "part-1.safetensors"})
    assert torch.equal(loading(directory)["norm"].tensor, norm)


@pytest.mark.parametrize(
    ("name", "message"),
    [("pytorch_model.bin", "only .safetensors files are read"), ("folder", "is no regular file")],
)
def test_an_index_that_names_no_safetensors_file(
    write: Any, loading: Any, tensors: Any, name: str, message: str
) -> None:
    directory = write(tensors)
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    (directory / "folder").mkdir()
    write_index(directory, dict.fromkeys(tensors, name))

    assert message in refused(loading, directory)


def bare(tensors: Any) -> Any:
    """The tensors as a base model saves them."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def test_names_of_a_base_model_are_found(write: Any, loading: Any, tensors: Any) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    whole = loading(write(tensors))

    params = loading(write(bare(tensors)))

    assert all(torch.equal(whole[name].tensor, params[name].tensor) for name in whole)


def test_names_of_both_kinds_are_refused(write: Any, loading: Any, tensors: Any) -> None:
    tensors["norm.weight"] = tensors.pop(NORM)

    message = refused(loading, write(tensors))

    assert "have names with 'model.' (" in message
    assert "and without (norm.weight)" in message


def test_unexpected_tensors_have_the_names_of_their_files(
    write: Any, loading: Any, tensors: Any
) -> None:
    message = refused(loading, write({**bare(tensors), "score.weight": torch.ones(1)}))

    assert message.endswith("unexpected score.weight")


@pytest.mark.parametrize("convert", [dict, bare])
def test_tied_embeddings_may_be_stored_as_the_output_matrix_alone(
    write: Any, loading: Any, tensors: Any, convert: Any
) -> None:
    embeddings = tensors.pop(EMBED)
    tensors[HEAD] = embeddings
    directory = write(convert(tensors), tie_word_embeddings=True)

    assert torch.equal(loading(directory)["embed"].tensor, embeddings)
    # An output matrix of its own is no embedding.
    assert f"missing {EMBED}" in refused(loading, write(convert(tensors)))


def test_an_output_matrix_that_is_left_out_is_told_from_a_lost_one(
    write: Any, tensors: Any
) -> None:
    directory = write(tensors)
    specs = QWEN3.params(QWEN3.config(read_config(directory)))
    assert find_missing_heads(directory, specs) == ()

    del tensors[HEAD]
    assert find_missing_heads(write(tensors), specs) == (HEAD,)
    assert find_missing_heads(write(bare(tensors)), specs) == (HEAD,)
    spread(directory, tensors, **{HEAD: "part-1.safetensors"})
    assert find_missing_heads(directory, specs) == ()


def scalar_specs(*rows: tuple[str, ...]) -> dict[str, ParamSpec]:
    """A parameter without dimensions, or a vector of such ones."""
    shape = (len(rows),) if len(rows) > 1 else ()
    return {"scale": ParamSpec(shape=shape, sources=rows, stacked=len(rows) > 1)}


def load_scalars(directory: Path, specs: dict[str, ParamSpec]) -> torch.Tensor:
    """The parameter of `scalar_specs`."""
    config = evolve(QWEN3.config(read_config(directory)))
    settings: Any = {"dtype": torch.float32, "device": torch.device("cpu"), "max_seq_len": 8}
    return load_weights(directory, specs, config, **settings)["scale"].tensor


def test_a_parameter_without_dimensions_is_read(write: Any) -> None:
    directory = write({"a": torch.tensor(3.0), "b": torch.tensor(4.0)})
    del_b = write({"a": torch.tensor(3.0)})

    assert load_scalars(del_b, scalar_specs(("a",))) == 3.0
    directory = write({"a": torch.tensor(3.0), "b": torch.tensor(4.0)})
    stacked = load_scalars(directory, scalar_specs(("a",), ("b",)))
    assert stacked.tolist() == [3.0, 4.0]
    with pytest.raises(PluginBroken, match=r"without dimensions: expected one .* got a, b"):
        load_scalars(directory, scalar_specs(("a", "b")))


def test_a_vector_is_no_parameter_without_dimensions(write: Any) -> None:
    directory = write({"a": torch.ones(1)})
    with pytest.raises(ModelError, match=r"a: expected shape \[\], got \[1\]"):
        load_scalars(directory, scalar_specs(("a",)))


def test_a_scalar_is_no_parameter_with_dimensions(write: Any, loading: Any, tensors: Any) -> None:
    tensors[NORM] = torch.tensor(1.0)
    assert f"{NORM}: expected shape [8], got []" in refused(loading, write(tensors))


def test_weight_files_without_an_index(write: Any, tensors: Any) -> None:
    files = weight_files(write(tensors))
    assert list(files.paths) == ["model.safetensors"]
    assert not files.assigned
    assert files.remarks == ()
