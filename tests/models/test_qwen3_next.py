"""Qwen3-Next, whose checkpoints have the maps of a delta rule by key head: the parameters of
Qwen3.5, and through the whole engine the tokens of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_parity import Answer, answer_alone, assert_equal, generate
from families import Case, log_probabilities
from fp8_checkpoints import quantize_directory
from often import often
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstock.config import EngineConfig
from headstock.engine.engine import Engine
from headstock.errors import ModelError
from headstock.ops.torch_ops import TorchOps
from headstock.spi import Model, ModelConfig, Params, Shard, Weight, WeightFormat, WeightKind
from headstock.startup.model_loading import read_model, shard_model
from headstock.weights import load_weights
from headstock_conformance.model.parity import add_tensors, expected, tokens, write
from headstock_qwen.hybrid import QWEN3_5_MOE, QWEN3_NEXT

HF: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-2,
    "rope_theta": 300.0,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
KEY, VALUE, KEY_HEADS, VALUE_HEADS = 8, 12, 2, 6
PROMPT = tokens(40)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_next")
    write(folder, HF)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[Answer]:
    """What transformers makes of each prompt alone."""
    return answer_alone(checkpoint)


WAYS: Sequence[dict[str, Any]] = (
    {"max_batch_tokens": 3, "max_running_requests": 2},
    {"page_size": 2, "num_pages": 26, "max_seq_len": 41, "max_batch_tokens": 11},
    {},
    {"max_batch_tokens": 9, "max_running_requests": 7, "overlap": False},
    {"ops": "onednn", "scheduler": "prefill-first", "page_size": 1, "num_pages": 300},
    {"ops": "fbgemm", "scheduler": "decode-first", "cache_type": "naive"},
)


@pytest.mark.feature("T6")
@pytest.mark.parametrize("settings", often(1, WAYS), ids=str)
def test_tokens_are_those_of_transformers(
    settings: dict[str, Any], checkpoint: Path, reference: list[Answer]
) -> None:
    outputs, engine = generate(checkpoint, **settings)

    assert (engine.stats().preemptions > 0) == (settings.get("num_pages") == 26)
    for number, (output, answer) in enumerate(zip(outputs, reference, strict=True)):
        assert_equal(output, answer, number)


@pytest.mark.parametrize(
    "settings", often(1, ({"max_batch_tokens": 100, "max_running_requests": 4}, {})), ids=str
)
def test_prompts_of_several_chunks_give_the_tokens_of_transformers(
    settings: dict[str, Any], checkpoint: Path
) -> None:
    prompts = [tokens(length, seed=length) for length in (63, 2, 64, 150)]
    outputs, _ = generate(checkpoint, prompts=prompts, max_seq_len=220, num_pages=300, **settings)
    answers = answer_alone(checkpoint, prompts=prompts)
    for number, (output, answer) in enumerate(zip(outputs, answers, strict=True)):
        assert_equal(output, answer, number)


def split_by_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as Qwen3.5 stores them: each map by itself, all heads one above the other."""
    served = VALUE_HEADS // KEY_HEADS
    found = {}
    for name, tensor in tensors.items():
        parts: dict[str, list[Tensor]] = {each: [] for each in "qkvzba"}
        rows = iter(tensor)
        layer, _, kind = name.removesuffix(".weight").rpartition("in_proj_")
        if kind not in ("qkvz", "ba"):
            found[name] = tensor
            continue
        sizes = {"q": KEY, "k": KEY, "v": served * VALUE, "z": served * VALUE}
        for _ in range(KEY_HEADS):
            for each in kind:
                parts[each] += [next(rows) for _ in range(sizes.get(each, served))]
        assert next(rows, None) is None
        for merged in ("qkv", "z") if kind == "qkvz" else ("b", "a"):
            joined = torch.stack([row for each in merged for row in parts[each]])
            found[f"{layer}in_proj_{merged}.weight"] = joined
    return found


def load(directory: Path, family: Model, part: ModelConfig, whole: ModelConfig) -> Params:
    return load_weights(
        directory,
        family.params(part),
        part,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_seq_len=len(PROMPT),
        whole=family.params(whole),
    )


@pytest.mark.parametrize("shard", [Shard(), Shard(count=2), Shard(index=1, count=2)], ids=str)
def test_parameters_and_their_shards_are_those_of_qwen3_5(
    shard: Shard, checkpoint: Path, tmp_path: Path
) -> None:
    kinds = [*["linear_attention"] * 2, "full_attention", "linear_attention"]
    dense = {"mlp_only_layers": [], "layer_types": kinds, "full_attention_interval": 4}
    same = HF | dense
    other = same | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
    }
    ours, theirs = tmp_path / "next", tmp_path / "3.5"
    ours.mkdir()
    theirs.mkdir()
    write(ours, same)
    (theirs / "config.json").write_text(json.dumps(other))
    split = split_by_head(load_file(ours / "model.safetensors"))
    save_file(split, theirs / "model.safetensors", metadata={"format": "pt"})

    found = []
    for directory, family in ((ours, QWEN3_NEXT), (theirs, QWEN3_5_MOE)):
        _, config = read_model(directory)
        part = config if shard.count == 1 else shard_model(family, config, shard)
        found.append(load(directory, family, part, config))
    assert found[0].keys() == found[1].keys()
    for name, weight in found[0].items():
        assert torch.equal(weight.tensor, found[1][name].tensor), name


def test_packed_maps_of_delta_rules_are_made_plain(checkpoint: Path, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    (plain / "config.json").write_text((checkpoint / "config.json").read_text())
    save_file(
        load_file(checkpoint / "model.safetensors"),
        plain / "model.safetensors",
        metadata={"format": "pt"},
    )
    # Blocks that begin and end amid the rows of a head.
    quantize_directory(plain, packed, (7, 5))

    def takes_all(spec: object, format: WeightFormat) -> bool:
        return True

    weights: list[Params] = []
    for directory in (plain, packed):
        family, config = read_model(directory)
        weights.append(
            load_weights(
                directory,
                family.params(config),
                config,
                dtype=torch.float32,
                device=torch.device("cpu"),
                max_seq_len=len(PROMPT),
                takes_format=takes_all,
            )
        )
    expected_weights, found = weights
    for name in ("delta_in", "delta_gate", "delta_gates"):
        weight: Weight = found[f"layers.0.{name}"]
        assert weight.format is None
        assert torch.equal(weight.tensor, expected_weights[f"layers.0.{name}"].tensor)
    format = found["layers.0.delta_out"].format
    assert format is not None
    assert format.kind is WeightKind.FP8_E4M3


def test_layers_that_predict_further_tokens_are_left_out_and_named(tmp_path: Path) -> None:
    case = Case("qwen3_next", {"rms_norm_eps": 0.01, "eos_token_id": 2})
    write(tmp_path, case.hf)
    theirs = expected(tmp_path, PROMPT)
    more = {"mtp.fc.weight": torch.ones(3, 5), "mtp.layers.0.mlp.gate.weight": torch.ones(7)}
    add_tensors(tmp_path, more)

    ours = log_probabilities(tmp_path, case.family, PROMPT, TorchOps())
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    engine = Engine(EngineConfig(model=str(tmp_path), num_pages=8, page_size=16, max_seq_len=32))
    assert [note for note in engine.summary.notes if "left out" in note] == [
        "2 tensors left out, of parts that this version does not compute: mtp.fc.weight, ..."
    ]
    engine.close()


def test_maps_by_themselves_are_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    split = split_by_head(load_file(checkpoint / "model.safetensors"))
    save_file(split, tmp_path / "model.safetensors", metadata={"format": "pt"})
    family, config = read_model(tmp_path)
    with pytest.raises(ModelError, match=r"missing model\.layers\.0\.linear_attn\.in_proj_qkvz\."):
        load(tmp_path, family, config, config)
