"""Weights end up where the declaration says, and what does not fit is named."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headstock.errors import MAX_ERROR_LENGTH, ModelError, PluginBroken
from headstock.spi import ParamSpec, Role, Weight
from headstock.weights import find_differing_copies, read_config
from headstock_qwen.families import QWEN3

LAYER = "model.layers.1."


def refused(loading: Any, directory: Path, **changes: Any) -> str:
    """The one line with which the directory is refused."""
    with pytest.raises(ModelError) as error:
        loading(directory, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_merged_and_stacked_parameters(write: Any, loading: Any, tensors: Any) -> None:
    params = loading(write(tensors))

    q, k, v = (tensors[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(params["layers.1.qkv"].tensor, torch.cat((q, k, v)))
    gate, up = (tensors[f"{LAYER}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(params["layers.1.gate_up"].tensor, torch.cat((gate, up)))
    q_norm, k_norm = (tensors[f"{LAYER}self_attn.{name}_norm.weight"] for name in "qk")
    assert torch.equal(params["layers.1.qk_norm"].tensor, torch.stack((q_norm, q_norm, k_norm)))
    assert params["rope.0"].tensor.shape == (20, 2, 2)


def test_dtype_and_progress(write: Any, loading: Any, tensors: Any) -> None:
    seen: list[tuple[str, int, int]] = []

    params = loading(
        write({name: tensor.bfloat16() for name, tensor in tensors.items()}),
        dtype=torch.float16,
        on_progress=lambda *event: seen.append(event),
    )

    assert params["embed"].tensor.dtype == torch.float16
    assert params["rope.0"].tensor.dtype == torch.float32
    # The norms of queries and keys are read once a head: two and one of 4 elements instead of one
    # and one.
    total = 2 * (sum(tensor.numel() for tensor in tensors.values()) + 2 * 4)
    assert seen[0] == ("weights", 0, total)
    assert seen[-1] == ("weights", total, total)
    assert all(before[1] <= after[1] for before, after in pairwise(seen))


@pytest.mark.parametrize("returned", [None, torch.ones(1)])
def test_operations_that_make_no_weight_of_a_parameter_are_named(
    returned: Any, write: Any, loading: Any, tensors: Any
) -> None:
    def careless(name: str, weight: Weight) -> Any:
        return returned

    text = r"careless\('.*'\): expected a headstock.spi.Weight, got (None|Tensor)"
    with pytest.raises(PluginBroken, match=text):
        loading(write(tensors), prepare=careless)


def test_missing_and_unexpected_tensors_are_named(write: Any, loading: Any, tensors: Any) -> None:
    del tensors[f"{LAYER}mlp.up_proj.weight"]
    tensors["model.extra"] = torch.zeros(1)

    message = refused(loading, write(tensors))

    assert message.endswith(f": missing {LAYER}mlp.up_proj.weight; unexpected model.extra")


def test_many_missing_tensors_are_counted(write: Any, loading: Any, tensors: Any) -> None:
    message = refused(loading, write({"lm_head.weight": tensors["lm_head.weight"]}))

    assert ": missing model.embed_tokens.weight, " in message and " and 22 more" in message
    assert len(message) <= MAX_ERROR_LENGTH


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.zeros(8, 4),
            "model.layers.1.self_attn.k_proj.weight: expected shape [4, 8], got [8, 4]",
        ),
        (
            torch.zeros(4, 8, dtype=torch.int8),
            "self_attn.k_proj.weight: expected one of F32, F16, BF16, F64, got I8",
        ),
        (torch.full((4, 8), float("nan")), "holds NaN or infinite numbers as float32"),
    ],
)
def test_wrong_tensors_are_named(
    write: Any, loading: Any, tensors: Any, tensor: torch.Tensor, message: str
) -> None:
    tensors[f"{LAYER}self_attn.k_proj.weight"] = tensor

    assert message in refused(loading, write(tensors))


def test_numbers_that_the_asked_dtype_cannot_hold(write: Any, loading: Any, tensors: Any) -> None:
    tensors["model.norm.weight"][0] = 1e30
    directory = write(tensors)

    assert "model.norm.weight" in refused(loading, directory, dtype=torch.float16)
    assert loading(directory)["norm"].tensor[0] == 1e30


def test_tied_embeddings_may_be_stored_twice(write: Any, loading: Any, tensors: Any) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    params = loading(write(tensors, tie_word_embeddings=True))

    assert "lm_head" not in params
    del tensors["lm_head.weight"]
    assert torch.equal(
        loading(write(tensors, tie_word_embeddings=True))["embed"].tensor, params["embed"].tensor
    )


@pytest.mark.parametrize(
    ("copy", "differing"),
    [
        (lambda tensor: tensor.clone(), ()),
        (lambda tensor: tensor.to(torch.bfloat16), ("lm_head.weight",)),
        (lambda tensor: tensor + 1e-6, ("lm_head.weight",)),
        (lambda tensor: tensor[:-1].clone(), ("lm_head.weight",)),
    ],
    ids=["equal", "rounded", "other numbers", "other shape"],
)
def test_copies_that_differ_are_found(
    copy: Any, differing: tuple[str, ...], write: Any, tensors: Any
) -> None:
    tensors["lm_head.weight"] = copy(tensors["model.embed_tokens.weight"])
    directory = write(tensors, tie_word_embeddings=True)
    specs = QWEN3.params(QWEN3.config(read_config(directory)))

    assert find_differing_copies(directory, specs) == differing


def test_a_copy_in_another_dtype_with_the_same_numbers_is_one(write: Any, tensors: Any) -> None:
    embeddings = tensors["model.embed_tokens.weight"].to(torch.bfloat16)
    tensors |= {"model.embed_tokens.weight": embeddings.float(), "lm_head.weight": embeddings}
    directory = write(tensors, tie_word_embeddings=True)

    assert (
        find_differing_copies(directory, QWEN3.params(QWEN3.config(read_config(directory)))) == ()
    )


def test_biases_join_their_weights(write: Any, loading: Any, tensors: Any) -> None:
    for layer in range(2):
        for name, size in (("q", 8), ("k", 4), ("v", 4), ("o", 8)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.randn(size)

    params = loading(write(tensors, attention_bias=True))

    expected = torch.cat([tensors[f"{LAYER}self_attn.{name}_proj.bias"] for name in "qkv"])
    assert torch.equal(params["layers.1.qkv"].bias, expected)
    assert not any(name.endswith(".bias") for name in params)


def test_each_weight_is_prepared_with_its_bias(write: Any, loading: Any, tensors: Any) -> None:
    for layer in range(2):
        for name, size in (("q", 8), ("k", 4), ("v", 4), ("o", 8)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.randn(size)
    seen: list[tuple[frozenset[Role], bool]] = []

    def double(spec: ParamSpec, weight: Weight) -> Weight:
        assert weight.tensor.shape[1:] == spec.shape[1:]
        seen.append((spec.roles, weight.bias is not None))
        return Weight(tensor=weight.tensor * 2, bias=weight.bias)

    params = loading(write(tensors, attention_bias=True), prepare=double)

    assert torch.equal(params["embed"].tensor, 2 * tensors["model.embed_tokens.weight"])
    # Of each layer's maps, qkv and attn_out have biases, gate_up and down have none.
    maps = [has_bias for roles, has_bias in seen if roles == {Role.LINEAR}]
    assert maps == [True, True, False, False] * 2
    assert len(seen) == len(params)
    assert {role for roles, _ in seen for role in roles} == {
        *(Role.LINEAR, Role.EMBEDDING, Role.HEAD),
        *(Role.NORM, Role.HEAD_NORM, Role.ROPE),
    }


def shards(directory: Path, tensors: Any) -> dict[str, str]:
    """Spread the tensors over two files; the map from tensor to file."""
    (directory / "model.safetensors").unlink()
    names = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, directory / file)
    return names


def write_index(directory: Path, names: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_shards(write: Any, loading: Any, tensors: Any) -> None:
    directory = write(tensors)
    whole = loading(directory)
    write_index(directory, shards(directory, tensors))

    parts = loading(directory)

    assert all(torch.equal(whole[name].tensor, parts[name].tensor) for name in whole)


def test_a_missing_shard_is_named(write: Any, loading: Any, tensors: Any) -> None:
    directory = write(tensors)
    write_index(directory, shards(directory, tensors))
    (directory / "part-1.safetensors").unlink()

    assert "part-1.safetensors is missing" in refused(loading, directory)


@pytest.mark.parametrize(
    "name",
    ["../out.safetensors", "/etc/hostname", "sub/out.safetensors", "a\0b", "\ud800", ".", ""],
)
def test_files_outside_the_directory_are_not_read(
    write: Any, loading: Any, tensors: Any, tmp_path_factory: Any, name: str
) -> None:
    directory = write(tensors)
    outside = tmp_path_factory.mktemp("outside") / "out.safetensors"
    (directory / "model.safetensors").rename(outside)
    write_index(directory, dict.fromkeys(tensors, name))

    assert "leads out of the directory" in refused(loading, directory)


def test_links_within_the_hub_cache_are_followed(
    write: Any, loading: Any, tensors: Any, tmp_path: Path
) -> None:
    flat = write(tensors)
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / "0123",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (flat / name).rename(blobs / f"hash-{name}")
        (snapshot / name).symlink_to(f"../../blobs/hash-{name}")

    assert loading(snapshot)["norm"].tensor.shape == (8,)


def test_dummy_weights_need_no_file_and_repeat(
    tmp_path: Path, write: Any, loading: Any, tensors: Any
) -> None:
    directory = write(tensors)
    (directory / "model.safetensors").unlink()

    first, second = loading(directory, dummy=True), loading(directory, dummy=True)

    assert all(torch.equal(first[name].tensor, second[name].tensor) for name in first)
    assert torch.equal(first["norm"].tensor, torch.ones(8))
    assert torch.equal(first["layers.0.qk_norm"].tensor, torch.ones(3, 4))
    assert first["embed"].tensor.std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(first["layers.0.qkv"].tensor, first["layers.1.qkv"].tensor)


def test_weight_bytes_are_what_is_allocated(write: Any, loading: Any, tensors: Any) -> None:
    directory = write(tensors)
    config = QWEN3.config(json.loads((directory / "config.json").read_text()))

    sizes: list[int] = []
    params = loading(
        directory,
        dtype=torch.bfloat16,
        max_seq_len=config.max_position,
        check_size=sizes.append,
    )

    assert sizes == [sum(w.tensor.nbytes for w in params.values())]
