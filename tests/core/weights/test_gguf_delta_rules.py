"""GGUF files of models with gated delta rules are the models they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from load_rank import WHOLE, load_rank
from safetensors.torch import load_file

from headstock.errors import ModelError
from headstock.spi import Shard
from headstock.startup.model_loading import read_model
from headstock.weights import load_weights, read_config, resolve_directory
from headstock_conformance.model.parity import (
    SHAPE,
    add_tensors,
    computed,
    expected,
    tokens,
    write,
)

pytest.importorskip("gguf")
from gguf_delta_rules import write_delta_rules

LINEAR, FULL = "linear_attention", "full_attention"
DENSE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    **{name: SHAPE[name] for name in SHAPE if "expert" not in name and "moe" not in name},
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "rms_norm_eps": 0.01,
}
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
NEXT = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "a value a key": DENSE | {"linear_num_value_heads": 2, "tie_word_embeddings": True},
    "whole heads": DENSE | {"partial_rotary_factor": 1.0, "linear_conv_kernel_dim": 2},
    "biases": DENSE | {"attention_bias": True, "partial_rotary_factor": 0.5},
    "experts": DENSE | EXPERTS,
    "next": DENSE | EXPERTS | NEXT,
    "next, a value a key": DENSE | EXPERTS | NEXT | {"linear_num_value_heads": 2},
}
# Rows of whole blocks of 32, which heads are not.
WIDE = {"hidden_size": 64, "linear_num_value_heads": 8, "linear_value_head_dim": 12}
WIDE |= {"intermediate_size": 96, "moe_intermediate_size": 32}
WIDE |= {"shared_expert_intermediate_size": 32}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def make(tmp_path: Path, hf: dict[str, Any], kind: str = "F32", **changes: Any) -> Path:
    """A file of the model, which is in `tmp_path` too."""
    write(tmp_path, hf)
    write_delta_rules(tmp_path, tmp_path / "small.gguf", kind, changes)
    return tmp_path / "small.gguf"


@pytest.mark.feature("R10")
@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_the_scores_of_its_model(name: str, tmp_path: Path) -> None:
    directory = resolve_directory(str(make(tmp_path, MODELS[name])))
    found, prompt = computed(directory, tokens(20)), tokens(20)

    torch.testing.assert_close(found, computed(tmp_path, prompt), atol=1e-5, rtol=0)
    torch.testing.assert_close(found, expected(tmp_path, prompt), atol=1e-4, rtol=0)


@pytest.mark.feature("R10")
@pytest.mark.parametrize("name", ["dense", "experts", "next"])
@pytest.mark.parametrize("shard", [WHOLE, Shard(index=1, count=2)], ids=["whole", "half"])
def test_parameters_of_blocks_are_the_numbers_of_the_file(
    name: str, shard: Shard, tmp_path: Path
) -> None:
    file = make(tmp_path, MODELS[name] | WIDE, "Q8_0")
    found = load_rank(resolve_directory(str(file)), shard)
    for key, weight in load_rank(tmp_path, shard).items():
        torch.testing.assert_close(found[key].tensor, weight.tensor, atol=1e-6, rtol=1e-6)


@pytest.mark.feature("R10")
@pytest.mark.parametrize("name", ["dense", "experts", "next"])
def test_a_layer_that_guesses_is_read_for_its_proposer_alone(name: str, tmp_path: Path) -> None:
    write(tmp_path, MODELS[name] | {"mtp_num_hidden_layers": 1})
    generator = torch.Generator().manual_seed(5)
    stored = load_file(tmp_path / "model.safetensors")
    layer = {
        name.replace("model.layers.1.", "mtp.layers.0."): tensor + 1
        for name, tensor in stored.items()
        if name.startswith("model.layers.1.")
    }
    width = DENSE["hidden_size"]
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    others = {f"{name}.weight": torch.randn(width, generator=generator) for name in norms}
    others["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=generator)
    add_tensors(tmp_path, layer | others)
    write_delta_rules(tmp_path, tmp_path / "small.gguf")
    directory = resolve_directory(str(tmp_path / "small.gguf"))

    assert torch.equal(computed(directory, tokens(9)), computed(tmp_path, tokens(9)))
    found, wanted = read_drafts(directory), read_drafts(tmp_path)
    assert found.keys() == wanted.keys() and "draft_join" in found
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)


def read_drafts(directory: Path) -> dict[str, torch.Tensor]:
    """The parameters of a model with its layers that guess."""
    family, config = read_model(directory)
    assert family.draft_config is not None
    config = family.draft_config(read_config(directory), config)
    params = load_weights(
        directory,
        family.params(config),
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=16,
    )
    return {name: weight.tensor for name, weight in params.items()}


@pytest.mark.feature("R10")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 61}, r"ssm.inner_size: expected a multiple of .*rank \(6\), got 61"),
        ({"ssm.time_step_rank": 5, "ssm.inner_size": 60}, r"multiple of .*group_count \(2\), got"),
        ({"ssm.group_count": None}, r"qwen35.ssm.group_count is missing"),
        ({"ssm.state_size": 40}, r"ssm_conv1d.weight is \[84, 4\] in F32, which its heads cannot"),
        ({"ssm.dt_b_c_rms": 1}, r"qwen35.ssm.dt_b_c_rms is a setting that is not read"),
        ({"rope.dimension_sections": [4, 2, 1, 1]}, r"expected three numbers and 0, got \[4, 2"),
        ({"rope.dimension_count": 0}, r"rope.dimension_count: expected .* above 0, .*got 0"),
        ({"attention.key_length": 0}, r"key_length: expected .* above 0, .*got 0"),
        ({"rope.freq_base": 0.0}, r"rope.freq_base: expected a number above 0, got 0"),
        ({"nextn_predict_layers": 3}, r"expected less than 3 layers, got 3"),
        ({"nextn_predict_layers": 1}, r"expected 0, as blk.2 has no nextn.eh_proj, got 1"),
    ],
)
def test_what_makes_no_delta_rules_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = make(tmp_path, DENSE, **changes)
    with pytest.raises(ModelError, match=message):
        resolve_directory(str(file))


@pytest.mark.feature("R10")
def test_maps_of_an_older_converter_are_read_and_two_of_one_place_are_refused(
    tmp_path: Path,
) -> None:
    write(tmp_path, MODELS["next"])
    write_delta_rules(tmp_path, tmp_path / "old.gguf", is_old=True)
    directory = resolve_directory(str(tmp_path / "old.gguf"))
    assert torch.equal(computed(directory, tokens(9)), computed(tmp_path, tokens(9)))

    changes = {"ssm.inner_size": 120}
    write_delta_rules(tmp_path, tmp_path / "new.gguf", changes=changes)
    with pytest.raises(ModelError, match=r"attn_qkv and attn_gate are \[84, 32\] and \[60, 32\]"):
        resolve_directory(str(tmp_path / "new.gguf"))


@pytest.mark.feature("R10")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.conv_kernel": 3}, r"conv1d"),
        ({"block_count": 2}, r"unexpected model\.layers\.2\."),
    ],
)
def test_tensors_of_other_sizes_and_layers_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = resolve_directory(str(make(tmp_path, DENSE, **changes)))
    with pytest.raises(ModelError, match=message):
        load_rank(directory)


@pytest.mark.feature("R10")
def test_rates_that_would_grow_are_refused(tmp_path: Path) -> None:
    file = make(tmp_path, DENSE)
    tensors = pytest.importorskip("gguf").GGUFReader(file, "r+").tensors
    next(each for each in tensors if each.name.endswith("ssm_a")).data[0] = 0.5
    with pytest.raises(ModelError, match=r"ssm_a: expected rates .* below 0, got 0\.5"):
        load_rank(resolve_directory(str(file)))
